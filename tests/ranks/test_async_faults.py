"""Asynchronous saves that cannot be written, and ranks that are killed while their threads write."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncmoe import checkpoints
from asyncmoe.checkpoints import intact
from tests.ranks.test_storage import launched
from tests.system.runs import wait_for

pytestmark = pytest.mark.ranks
Job = tuple[dict[str, Any], Callable[[], list[int]], Path]


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
    for pid in found["pids"]:
        os.kill(int(pid), signal.SIGKILL)
    assert wait_for(lambda: not alive(), 60), [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in alive()]
    newest = checkpoints.newest(run)
    assert newest == checkpoints.directory(run, 6)
    assert intact.fault_in_share(newest, 0, 1) is None
    checkpoints.start(run, 7)
    assert list(half.iterdir()) == [], "the next save begins with nothing"
