"""The outcome of a job whose steps have ended. SLURM's replies are simulated; tests/system/test_slurm.py has real ones."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncmoe import checkpoints
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, ConfigError, Interrupted, InvariantBroken
from asyncmoe.launch.slurm import control, outcome
from asyncmoe.launch.slurm.steps import Allocation
from tests.configs import demo

WHERE = Allocation(12, "12_3", 0, ("n1",))
DEAD = AsyncmoeError("trainer on n3: was ended by SIGKILL")
MISTAKE = ConfigError("controller on n1: scoring.scorer", got="x", expected="y")


def asks(requeue: bool = False, save: bool = False, now: bool = False) -> Any:
    """What signals asked for, without their handlers."""
    return SimpleNamespace(requeue=requeue, save=requeue or save, now=now)


class Job:
    """A run directory, and the requeues of its job."""

    def __init__(self, tmp: Path) -> None:
        overrides = [f"run.dir={tmp}", "warmup.steps=2", "run.steps=10", "cluster.requeues=2"]
        self.config: Config = demo(*overrides)
        self.requeued: list[str] = []
        self.running, self.preempted = True, False

    def save(self, step: int) -> Path:
        checkpoints.start(self.config.run.dir, step)
        return checkpoints.finish(self.config.run.dir, step, {"step": step}, checkpoints.Retention(2))

    def conclude(self, asked: Any, cause: AsyncmoeError | None = None, before: Path | None = None) -> None:
        outcome.conclude(WHERE, self.config, before, cause, asked)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job(tmp_path)
    monkeypatch.setattr(control, "requeue", made.requeued.append)
    monkeypatch.setattr(control, "running", lambda name: made.running)
    monkeypatch.setattr(control, "preempted", lambda name: made.preempted)
    return made


def test_before_the_time_limit_it_goes_back_into_the_queue(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    before, _ = job.save(4), job.save(7)
    job.conclude(asks(requeue=True), before=before)
    assert job.requeued == ["12_3"]
    assert "job 12_3 is requeued with step-00000007" in capsys.readouterr().out


def test_a_time_limit_that_leaves_no_step_is_named_instead_of_tried_for_ever(job: Job) -> None:
    before = job.save(4)
    with pytest.raises(AsyncmoeError, match=r"job 12_3 made no step .*has step-00000004.*raise sbatch --time"):
        job.conclude(asks(requeue=True), before=before)
    assert job.requeued == []


def test_a_user_who_stops_it_is_told_where(job: Job) -> None:
    with pytest.raises(Interrupted, match="stopped before the first step; the same command starts over"):
        job.conclude(asks(save=True))
    job.save(7)
    with pytest.raises(Interrupted, match=r"stopped at step 7 of 12, which is saved; the same command resumes from .*step-00000007"):
        job.conclude(asks(save=True))
    assert job.requeued == []


def test_a_loss_is_requeued_so_often_as_allowed(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for count in (1, 2):
        job.conclude(asks(), DEAD)
        assert f"is requeued, {count} of at most 2 times" in capsys.readouterr().out
    with pytest.raises(AsyncmoeError, match=r"trainer on n3: .*SIGKILL.*lost 3 times, cluster.requeues allows 2") as raised:
        job.conclude(asks(), DEAD)
    assert raised.value.exit_code == 1
    assert job.requeued == ["12_3", "12_3"]


def test_a_preemption_is_no_loss(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    before = job.save(4)
    for job.preempted, asked, cause in ((False, asks(), None), (True, asks(), DEAD), (True, asks(requeue=True), None)):
        job.conclude(asked, cause, before)
        assert "with step-00000004: SLURM warned its steps of their end, as before a preemption" in capsys.readouterr().out
    assert job.requeued == ["12_3"] * 3
    assert outcome.lost_before(job.config.run.dir / outcome._LOST, "12_3") == 0


@pytest.mark.parametrize("cause", [MISTAKE, InvariantBroken("numbers that would be wrong again")])
def test_what_would_recur_ends_it_with_its_own_status(job: Job, cause: AsyncmoeError) -> None:
    with pytest.raises(AsyncmoeError, match=f"^{re.escape(str(cause))}$") as raised:
        job.conclude(asks(), cause)
    assert raised.value.exit_code == cause.exit_code
    assert job.requeued == []


def test_a_cancelled_job_stays_out_of_the_queue_however_its_steps_end(job: Job) -> None:
    with pytest.raises(AsyncmoeError, match="job 12_3 was cancelled"):
        job.conclude(asks(now=True), DEAD)
    job.running = False  # the signal has not come yet
    with pytest.raises(AsyncmoeError, match="job 12_3 was cancelled"):
        job.conclude(asks(), DEAD)
    job.preempted = True
    with pytest.raises(AsyncmoeError, match="job 12_3 was preempted; progress since the last checkpoint is lost"):
        job.conclude(asks(now=True), DEAD)
    assert job.requeued == []


def test_losses_of_another_job_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lost.json"
    assert outcome.lost_before(path, "12") == 0
    path.write_text('["12", 2]')
    assert (outcome.lost_before(path, "12"), outcome.lost_before(path, "13")) == (2, 0)
    path.write_bytes(b'["12"')
    assert outcome.lost_before(path, "12") == 0
