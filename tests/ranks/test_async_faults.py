"""Checkpoints that cannot be written, and ranks that are killed while their threads write."""

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

from asyncmoe import checkpoints
from asyncmoe.checkpoints import intact
from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from tests.ranks.launch import HERE
from tests.system.runs import wait_for

pytestmark = pytest.mark.ranks
_MARK = "ASYNCMOE_TEST_MARK"
Job = tuple[dict[str, Any], Callable[[], list[int]], Path]


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


def _has(environ: Path, mark: str) -> bool:
    try:
        return mark.encode() in environ.read_bytes()
    except OSError:
        return False


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """What the worker has found, in its last save; what lists the processes of its launch; the run's directory."""
    path = tmp_path_factory.mktemp("faults")
    with launched("async_faults.py", path) as (found, alive):
        yield found, alive, path / "run"


@pytest.mark.parametrize("step", ["2", "3"])
def test_every_rank_raises_the_reason_of_the_one_that_could_not_write(job: Job, step: str) -> None:
    first, second = job[0]["failures"][step]
    assert first == second
    assert first.startswith(f"StorageError: checkpoint of step {step}: cannot write ")
    assert f"step-{int(step):08d}.writing on {socket.gethostname()}: File too large (EFBIG), " in first
    assert first.endswith("the run resumes from step-00000001")


def test_a_fault_that_is_not_storages_is_told_with_its_rank(job: Job) -> None:
    assert job[0]["failures"]["bug"] == ["AsyncmoeError: checkpoint of step 4: trainer rank 1: ValueError: a bug"] * 2


def test_the_checkpoint_before_stays_whole_and_later_saves_go_on(job: Job) -> None:
    assert job[0]["kept"] == ["step-00000001"]
    assert job[0]["loaded"] == 1
    assert job[0]["saved"] == ["step-00000006"]


def test_a_save_waits_for_the_one_before_and_both_are_told(job: Job) -> None:
    assert job[0]["told"] == [1, 5, 6]
    assert job[0]["waited"]


def test_a_kill_while_the_thread_writes_leaves_the_checkpoint_before_and_no_process(job: Job) -> None:
    found, alive, run = job
    half = checkpoints.temporary(run, 7)
    assert any(file.stat().st_size for file in half.iterdir()), "it was killed in the middle"
    os.kill(int(found["pids"][0]), signal.SIGKILL)
    assert wait_for(lambda: not alive(), 60), [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in alive()]
    newest = checkpoints.newest(run)
    assert newest == checkpoints.directory(run, 6)
    assert intact.fault_in_share(newest, 0, 1) is None
    checkpoints.start(run, 7)
    assert list(half.iterdir()) == [], "the next save begins with nothing"
