"""The first cause of several processes' ends."""

from __future__ import annotations

import errno
import fcntl
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncmoe.errors import UserError
from asyncmoe.launch import local, torchrun
from asyncmoe.launch.run_processes import certain, root_cause
from asyncmoe.process import Child


@dataclass
class Ended:
    """A process that has ended."""

    name: str
    returncode: int
    reason: str | None
    log = Path("log")
    signal = wait = None

    def why(self) -> str:
        return f"{self.name}: {self.reason or self.returncode}"


def test_the_first_cause_is_told_and_a_mistake_of_the_user_is_marked() -> None:
    silent = Ended("trainer.0", 1, None)
    waited = Ended("trainer.1", 1, "waited 30.0 s for the controller: ask")
    ended = Ended("engine.0", 1, "engine.0 was ended by the controller: the run has failed: no engine is left")
    mistake = Ended("controller", 2, "port 30000: got in use, expected a free port")
    assert str(root_cause([silent, waited, ended, mistake])) == "controller: port 30000: got in use, expected a free port"
    assert root_cause([silent, mistake]).exit_code == UserError.exit_code
    assert str(root_cause([silent, waited])) == "trainer.0: 1"
    assert root_cause([silent, waited]).exit_code == 1
    wrong = Ended("trainer.1", 3, "the loss is nan")
    assert (str(root_cause([silent, waited, wrong])), root_cause([silent, waited, wrong]).exit_code) == ("trainer.1: the loss is nan", 3)
    assert not certain([silent, waited, wrong])
    lost, killed = Ended("trainer.0", 1, "from rank 0 to rank 1: lost"), Ended("trainer.1", 1, "a rank was ended by SIGKILL")
    assert str(root_cause([silent, lost, killed, waited])) == "trainer.1: a rank was ended by SIGKILL"
    assert str(root_cause([lost, Ended("engine.0", -9, None)])) == "engine.0: -9"
    mute, full = Ended("trainer", 2, None), Ended("controller", 2, "the log: cannot write ...: No space left on device")
    assert str(root_cause([mute, full])) == f"controller: {full.reason}", "a full disk kept the trainer's reason out of its log"
    assert not certain([mute])
    assert root_cause([mute]).exit_code == UserError.exit_code
    assert certain([lost, killed])
    assert certain([lost, mistake])
    assert str(root_cause([silent, lost])) == "trainer.0: from rank 0 to rank 1: lost"


@pytest.mark.parametrize("name", ["controller", "controller on 10.0.0.4 (n1)"])
@pytest.mark.parametrize("status", [1, 139, -11])
@pytest.mark.parametrize("order", [1, -1])
def test_a_rank_that_crashes_as_the_controller_fails_does_not_hide_its_reason(name: str, status: int, order: int) -> None:
    began = Ended(name, 1, "engine.0 did not start: unrecognized arguments: --no-such-argument")
    crashed = Ended("trainer", status, "a rank was ended by SIGSEGV: rank 0 on n1")
    assert str(root_cause([began, crashed][::order])) == f"{name}: {began.reason}"
    for other in (
        Ended(name, 1, "waited 30.0 s for the trainer: a lease"),
        Ended(name, 1, "no engine is left: engine.0: the sender is gone"),
        Ended(name, 1, None),
        Ended("trainer.1", 1, "from rank 0 to rank 1: lost"),
    ):
        assert str(root_cause([other, crashed][::order])) == "trainer: a rank was ended by SIGSEGV: rank 0 on n1"
    assert str(root_cause([began, Ended("trainer", -11, None)][::order])) == f"{name}: {began.reason}"
    for killed in (Ended("trainer", 137, "a rank was ended by SIGKILL: rank 0 on n1"), Ended("engine.1", -9, None)):
        assert str(root_cause([began, killed][::order])) == killed.why()


def test_the_status_of_an_agent_is_that_of_the_rank_that_failed_first() -> None:
    def first(*failed: tuple[int, int, int]) -> int:
        return torchrun.first([torchrun.FailedRank(*one) for one in failed]).rank

    assert first((0, 1, 5), (1, -9, 5)) == 1
    assert first((0, -9, 5), (1, 1, 5), (3, 2, 6)) == 3
    assert first((2, 1, 5), (1, 1, 5)) == 1
    assert first((0, -15, 5), (1, -9, 5)) == 1, "torchrun ends the survivors itself"
    assert first((0, 1, 5), (1, 3, 6), (2, -9, 5)) == 1, "a rank whose numbers are wrong has the others end"
    assert first((0, 3, 5), (1, 2, 6)) == 1
    assert first((0, 1, 5), (1, -9, 35)) == 0, "a rank that hung is killed long after the one that noticed"
    assert torchrun.status(2) == 2
    assert torchrun.status(-signal.SIGKILL) == 137


def test_a_run_directory_has_one_run_and_may_be_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local.claim(tmp_path / "run"), pytest.raises(UserError, match="in use by another run"), local.claim(tmp_path / "run"):
        pass

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with local.claim(tmp_path / "run"), local.claim(tmp_path / "run"):
        pass


def test_the_rank_that_was_killed_is_named_and_not_the_survivor(tmp_path: Path) -> None:
    """torchrun ends the other one with SIGTERM."""
    program = "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    (tmp_path / "rank.py").write_text(program)
    arguments = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "0", str(tmp_path / "rank.py")]
    child = Child("trainer", [sys.executable, "-m", "asyncmoe.launch.torchrun", *arguments], tmp_path / "log")
    assert child.wait(60)
    assert child.why().startswith("a rank was ended by SIGKILL, as when memory runs out: rank 1 on ")
