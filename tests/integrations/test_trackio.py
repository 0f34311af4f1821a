"""Trackio on this machine, read back by Trackio's own API."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("trackio") is None:
    pytest.skip("run: make test-integrations ONLY=trackio", allow_module_level=True)
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")  # read when the package is imported

from asyncmoe.telemetry.loggers import sender, state
from asyncmoe.telemetry.loggers.trackio_backend import Trackio
from tests.integrations.logged_run import config_of, figures, recorded, write_run


@pytest.fixture(scope="module", autouse=True)
def _home() -> Iterator[None]:
    yield
    shutil.rmtree(os.environ.pop("TRACKIO_DIR"))


def _rows(run_dir: Path) -> list[dict[str, object]]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs("p", state.read(run_dir, "trackio").id)


def _by_step(rows: list[dict[str, object]]) -> dict[tuple[str, int], object]:
    found: dict[tuple[str, int], object] = {}
    for row in rows:
        step = row["step"]
        assert isinstance(step, int)
        names = [name for name in row if name not in ("step", "timestamp") and not name.startswith("rollout/")]
        assert not [name for name in names if (name, step) in found], "each figure once"
        found |= {(name, step): row[name] for name in names}
    return found


def test_a_run_and_its_resume_are_one_run_with_the_figures_of_the_records(tmp_path: Path) -> None:
    import trackio

    run_dir = tmp_path / "run"
    config_of(run_dir, trackio={"project": "p", "group": "g"})
    recorded(run_dir)
    sender.send(run_dir, [])
    assert _by_step(_rows(run_dir)) == pytest.approx(figures(run_dir))
    assert any(name.startswith("rollout/") for row in _rows(run_dir) for name in row)
    last = state.read(run_dir, "trackio").sent.step
    write_run(run_dir, warmup=2, rl=last + 4, first=last - 2, start=1_900_000_000.0)
    sender.send(run_dir, [])
    rows = _rows(run_dir)
    assert sorted(row["step"] for row in rows if "loss" in row) == list(range(1, last + 7))
    (run,) = list(trackio.Api().runs("p"))
    assert run.name == state.read(run_dir, "trackio").id
    assert (run.config["run.steps"], run.config["versions.python"]) == (8, ".".join(map(str, sys.version_info[:3])))


def test_samples_are_a_table(tmp_path: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    section = config_of(tmp_path / "run", trackio={"project": "t"}).telemetry.trackio
    assert section is not None
    backend = Trackio(section, "run")
    opened = backend.open(None, 0, {})
    backend.table("samples", 3, ["question", "reward"], [("2+2=", 1.0), ("ünï", None)])
    assert backend.close(True) is None
    (row,) = SQLiteStorage.get_logs("t", opened.id)
    assert row["step"] == 3
    assert row["samples"]["_value"] == [{"question": "2+2=", "reward": 1.0}, {"question": "ünï", "reward": None}]


def test_the_command_says_what_was_sent(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config_of(run_dir, trackio={"project": "q"})
    recorded(run_dir)
    done = subprocess.run([sys.executable, "-m", "asyncmoe", "log", str(run_dir)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"trackio: has every step up to {state.read(run_dir, 'trackio').sent.step}"
