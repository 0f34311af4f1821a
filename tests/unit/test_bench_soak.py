"""Slopes of a soak run, from made samples: what grows is found, and what is only noisy is not."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.held import below, held, shared_files, size
from benchmarks.soak_slopes import BOUND_MB, figures, line, table


def samples(grown_mb: float = 0.0, noise_mb: float = 0.0, descriptors: int = 0, count: int = 720) -> list[dict[str, Any]]:
    """Two hours of a run of one step a second; a process that grows by so much in 1,000 steps after settling."""
    random = Random(0)
    made = []
    for i in range(count):
        at = 10.0 * i
        mb = 100.0 + min(at, 500.0) / 10 + grown_mb * at / 1000 + random.gauss(0.0, noise_mb)
        each = {
            "rss": mb * 1e6,
            "pss": mb * 1e6,
            "anonymous": mb * 1e6,
            "threads": 4,
            "descriptors": 20 + (descriptors if i > count / 2 else 0),
        }
        passing = {"short": each} if i == count // 2 else {}
        made.append(
            {
                "s": at,
                "steps": int(at),
                "processes": {"controller": each} | passing,
                "folders": {"log": {"files": 2, "bytes": int(1e6 + 1e3 * at)}},
            }
        )
    return made


@pytest.mark.parametrize("grown", [0.0, 0.5, 3.0])
def test_a_slope_is_found_within_its_interval(grown: float) -> None:
    found = figures(samples(grown, noise_mb=1.0))
    memory = found["processes"]["controller"]["anonymous"]
    assert memory["low"] < grown < memory["high"]
    assert memory["high"] - memory["low"] < 0.3
    assert memory["per_hour"] == pytest.approx(3.6 * memory["per_1000_steps"], abs=0.01)
    assert found["flat"] == (grown < BOUND_MB)
    assert found["passing"] == {"short": 1}
    assert found["folders"]["log"]["bytes"]["per_1000_steps"] == pytest.approx(1e6)
    assert f"{memory['per_1000_steps']:.2f}" in table(found)


def test_descriptors_that_stay_open_are_no_flat_run() -> None:
    found = figures(samples(descriptors=1))
    assert not found["flat"]
    assert found["processes"]["controller"]["descriptors"] == {"first": 20, "last": 21, "most": 21}


def test_too_few_samples_give_no_slopes() -> None:
    with pytest.raises(ValueError, match="expected at least 60"):
        figures(samples(count=100))


def test_the_line_is_that_of_least_squares() -> None:
    assert line([0.0, 1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0]) == pytest.approx((2.0, 0.0))


def test_what_a_process_holds_is_counted(tmp_path: Path) -> None:
    words = (
        "import mmap, sys",
        "a = bytearray(50_000_000)",
        "f = open(sys.argv[1], 'r+b')",
        "m = mmap.mmap(f.fileno(), 0)",
        "print(1, flush=True)",
    )
    program = "; ".join([*words, "input()"])
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        shared.truncate(1 << 16)
        child = subprocess.Popen([sys.executable, "-c", program, shared.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        found = held(child.pid)
        assert 50e6 < found.anonymous < 100e6
        assert found.rss >= found.anonymous
        assert (found.threads, found.descriptors) == (1, 5)
        assert shared_files(child.pid) == {shared.name}
        child.communicate(b"\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"123")
    assert size(below(tmp_path)) == 3
