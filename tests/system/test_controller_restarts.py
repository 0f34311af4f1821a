"""A controller that is lost starts again in place: engine and ranks go on, and everything is trained once.

`pytest -s` shows the times.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from asyncmoe.telemetry import processes
from tests.system.runs import Command, logs, marked_pids, metrics, start, wait_for
from tests.system.test_journal import SHAPE, WARM, check, trained
from tests.system.test_restarts import ENGINE, pid_of

pytestmark = pytest.mark.system
RANKS = ("trainer.0", "trainer.1")


def of_run(directory: Path, command: Command) -> list[int]:
    """Ids of what a lost controller must leave alone: the ranks, the keeper and the engine's main process."""
    return [*(pid_of(directory, role) for role in (*RANKS, "keeper")), marked_pids(command.mark, ENGINE)[0]]


def served(directory: Path, since: float) -> bool:
    """Whether a controller has recorded tokens that were generated after a moment."""
    lines = [json.loads(line) for line in (directory / "rollout.jsonl").read_text().splitlines() if line.endswith("}")]
    return any(one["time"] > since and one["running"] > 0 for one in lines)


def lose(directory: Path, command: Command, number: signal.Signals = signal.SIGKILL) -> tuple[float, float]:
    """End the controller by a signal; returns the seconds until the next one serves, and until a step was committed at it."""
    before, last, others = pid_of(directory, "controller"), metrics(directory)[-1]["step"], of_run(directory, command)
    begin, at = time.monotonic(), time.time()
    os.kill(before, number)
    assert wait_for(lambda: served(directory, at), 60, 0.02), logs(directory)
    serves = time.monotonic() - begin
    assert wait_for(lambda: trained(directory, 0, last + 2), 60), logs(directory)
    assert of_run(directory, command) == others, "they were left alone"
    assert pid_of(directory, "controller") != before
    return serves, time.monotonic() - begin


def test_a_controller_that_is_killed_costs_neither_an_engine_nor_a_rank_nor_a_sample(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = start(directory, *SHAPE, "run.steps=9")
    assert wait_for(lambda: trained(directory, 0, WARM + 2), 150), logs(directory)
    serves, trains = lose(directory, command)
    print(json.dumps({"lost": "controller", "serves_s": round(serves, 2), "two_steps_s": round(trains, 2)}))
    status, out, error = command.finish()
    assert status == 0, error[-3000:] + logs(directory)
    assert command.gone(), command.alive()
    assert "the controller starts again, restart 1 of 2 without a new step: controller ended with status -9" in out + error
    check(directory)
