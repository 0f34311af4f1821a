"""Checkpoints that cannot be written, and ranks that are killed while they write one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from tests.ranks.launch import HERE
from tests.system.runs import wait_for

pytestmark = pytest.mark.ranks
_MARK = "ASYNCMOE_TEST_MARK"


@contextmanager
def launched(worker: str, path: Path) -> Iterator[tuple[dict[str, Any], Callable[[], list[int]]]]:
    """What a worker on two ranks has found, in its last save, and what lists the processes of its launch."""
    mark, out = uuid.uuid4().hex, path / "found.json"
    make_model(path / "model", MadeModel(), seed=0)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / worker)]
    found = f"{os.environ.get('PYTHONPATH', '')}:{HERE.parent.parent}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": found, _MARK: mark}

    def alive() -> list[int]:
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _has(entry / "environ", mark)]

    with (path / "log").open("w") as log:
        process = subprocess.Popen([*command, str(out), str(path / "model")], stdout=log, stderr=log, env=environment)
    try:
        wait_for(lambda: out.exists() or process.poll() is not None, 240)
        assert out.exists(), (path / "log").read_text()[-4000:]
        yield json.loads(out.read_text()), alive
    finally:
        process.kill()
        process.wait(10)
        for pid in alive():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Callable[[], list[int]]]]:
    with launched("storage.py", tmp_path_factory.mktemp("storage")) as found:
        yield found


def _has(environ: Path, mark: str) -> bool:
    try:
        return mark.encode() in environ.read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("step", ["2", "3"])
def test_every_rank_says_the_same_of_the_one_that_could_not_write(job: tuple[dict[str, Any], Any], step: str) -> None:
    first, second = job[0]["failures"][step]
    assert first == second
    assert first.startswith(f"checkpoint of step {step}: cannot write ")
    assert f"step-{int(step):08d}.writing on {socket.gethostname()}: File too large (EFBIG), " in first
    assert first.endswith("the run resumes from step-00000001")


def test_what_was_half_written_is_removed_and_the_checkpoint_before_is_whole(job: tuple[dict[str, Any], Any]) -> None:
    assert job[0]["kept"] == ["step-00000001"]
    assert job[0]["loaded"] == 1
    assert job[0]["saved"] == ["step-00000004"]


def test_a_rank_that_is_killed_while_it_saves_leaves_no_process(job: tuple[dict[str, Any], Callable[[], list[int]]]) -> None:
    found, alive = job
    pids = [int(pid) for pid in found["pids"]]
    assert wait_for(lambda: set(pids) <= set(alive()), 60), [Path(f"/proc/{pid}/cmdline").exists() for pid in pids]
    os.kill(pids[0], signal.SIGKILL)
    assert wait_for(lambda: not alive(), 60), [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in alive()]
