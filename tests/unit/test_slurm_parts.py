"""Of several ends the first cause."""

from __future__ import annotations

import errno
import fcntl
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncmoe.errors import UserError
from asyncmoe.launch import failures, local, torchrun


@dataclass(frozen=True)
class Step:
    """A step that has failed."""

    name: str
    returncode: int
    reason: str | None
    log: Path = Path("logs/log")

    def why(self) -> str:
        return self.reason or f"{self.name} {self.returncode}"


MISTAKE = Step("controller on n1", 2, "controller on n1: scoring.scorer: got x, expected y")
DEAD = Step("trainer on n3", -9, None)
RANK_DEAD = Step("trainer on n3", -9, "a rank was ended by SIGKILL, as when memory runs out: rank 1")
FAILED = Step("engine.0 on n1", 1, "no memory on the GPU")
WAITED = Step("trainer on n2", 1, "trainer.0 on n2: waited 30.0 s for the controller: an answer")
SILENT = Step("trainer on n2", 1, None)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        ([WAITED, MISTAKE, DEAD], MISTAKE),
        ([WAITED, FAILED, DEAD], DEAD),
        ([WAITED, FAILED, RANK_DEAD], RANK_DEAD),
        ([WAITED, FAILED], FAILED),
        ([WAITED, SILENT], SILENT),
    ],
)
def test_the_end_that_the_others_follow_from(
    ended: list[Step], cause: Step, order: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()  # where there is none, the disk is the cause
    error = failures.failure(ended[::order])
    assert str(error) == cause.why()
    assert error.exit_code == (2 if cause is MISTAKE else 1)


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
