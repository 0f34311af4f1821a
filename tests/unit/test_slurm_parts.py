"""Of several ends the first cause, and what becomes of the job. What srun prints was recorded from SLURM 22.05."""

from __future__ import annotations

import errno
import fcntl
import signal
from pathlib import Path

import pytest

from asyncmoe.errors import InvariantBroken, UserError
from asyncmoe.launch import failures, local, torchrun
from asyncmoe.launch.slurm import outcome, parts
from asyncmoe.launch.slurm.parts import EndedStep

ONE_OF_TWO = """srun: error: n2: task 0: Exited with exit code 2
srun: launch/slurm: _step_signal: Terminating StepId=3.1
srun: error: n3: task 1: Terminated
srun: Force Terminated StepId=3.1
"""
KILLED = "srun: error: n2: task 0: Killed\nsrun: Force Terminated StepId=3.0\n"
ALIKE = "srun: error: n[2-3]: tasks 0-1: Exited with exit code 1\n"
NOT_STARTED = "srun: error: Unable to create step for job 3: Requested node configuration is not available\n"


@pytest.mark.parametrize(
    ("output", "status", "end"),
    [
        (ONE_OF_TWO, 143, ("n2", 2)),
        (KILLED, 137, ("n2", -9)),
        (ALIKE, 1, ("n[2-3]", 1)),
        ("srun: error: n4: task 3: Segmentation fault (core dumped)\n", 139, ("n4", -signal.SIGSEGV)),
        (NOT_STARTED, 1, ("n2,n3", 1)),
        ("", -9, ("n2,n3", -9)),
        ("", 143, ("n2,n3", -15)),
    ],
)
def test_the_first_task_that_ended_badly(output: str, status: int, end: tuple[str, int]) -> None:
    assert parts.first_end(output, ("n2", "n3"), status) == end


def test_a_task_that_was_ended_because_of_another_is_not_the_first() -> None:
    aborted = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n" + KILLED
    assert parts.first_end(aborted, ("n2",), 1) == ("n2", 1)


def test_a_reason_is_a_line_of_ours_or_the_complaint_of_srun() -> None:
    assert parts.reason({"n2": "loading\nerror: no room\nerror: later\n", "n3": "error: other\n"}, KILLED) == "no room"
    assert parts.reason({"n2": "loading\n"}, KILLED) is None
    told = {"n2": "error: trainer.0 on n2: closed by peer\nerror: a rank was ended by SIGKILL, as when memory runs out: rank 1\n"}
    assert parts.reason(told, "") == "a rank was ended by SIGKILL, as when memory runs out: rank 1"
    assert parts.reason({}, NOT_STARTED) == NOT_STARTED.strip()
    execve = "slurmstepd: error: execve(): nowhere: No such file or directory\nsrun: error: n1: task 0: Exited with exit code 2\n"
    assert parts.reason({"n1": ""}, execve) == "slurmstepd: error: execve(): nowhere: No such file or directory"
    cancelled = "slurmstepd: error: *** STEP 3.0 ON n2 CANCELLED AT 2026-11-22T03:41:00 ***\n"
    assert parts.reason({}, cancelled + KILLED) is None


MISTAKE = EndedStep("controller", "n1", 2, "controller on n1: scoring.scorer: got x, expected y", Path("logs/controller.n1.log"))
DEAD = EndedStep("trainer", "n3", -9, None, Path("logs/trainer.n3.log"))
RANK_DEAD = EndedStep("trainer", "n3", -9, "a rank was ended by SIGKILL, as when memory runs out: rank 1", Path("logs/trainer.n3.log"))
FAILED = EndedStep("engine.0", "n1", 1, "no memory on the GPU", Path("logs/engine.0.n1.log"))
WAITED = EndedStep("trainer", "n2", 1, "trainer.0 on n2: waited 30.0 s for the controller: an answer", Path("logs/trainer.n2.log"))
SILENT = EndedStep("trainer", "n2", 1, None, Path("logs/trainer.n2.log"))


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
    ended: list[EndedStep], cause: EndedStep, order: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()  # where there is none, the disk is the cause
    error = failures.failure(ended[::order])
    assert str(error) == cause.why()
    assert error.exit_code == (2 if cause is MISTAKE else 1)


def test_a_mistake_is_never_requeued_and_a_loss_so_often_as_allowed() -> None:
    assert outcome.decide(2, 0, 3) == "fail"
    assert [outcome.decide(1, lost, 2) for lost in range(4)] == ["requeue", "requeue", "fail", "fail"]
    assert outcome.decide(1, 0, 0) == "fail"
    assert outcome.decide(InvariantBroken.exit_code, 0, 3) == "fail", "wrong numbers would be wrong again"


def test_a_cause_names_part_node_and_log_once() -> None:
    assert FAILED.why() == "engine.0 on n1: no memory on the GPU (log: logs/engine.0.n1.log)"
    assert MISTAKE.why() == "controller on n1: scoring.scorer: got x, expected y (log: logs/controller.n1.log)"
    assert RANK_DEAD.why().startswith("trainer on n3: a rank was ended by SIGKILL")
    assert DEAD.why().startswith("trainer on n3: was ended by SIGKILL")
    assert "logs/trainer.n3.log" in DEAD.why()
    assert SILENT.why() == "trainer on n2: ended with status 1; its log is logs/trainer.n2.log"


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
