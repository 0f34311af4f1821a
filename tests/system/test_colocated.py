"""Trainer and engines that use the same devices in turn, on whole runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncmoe.occupancy import DeviceTurn
from asyncmoe.telemetry import processes
from tests.system import trained_once
from tests.system.runs import AGREES, metrics, run, start, wait_for
from tests.system.trained_once import WARM, process

pytestmark = pytest.mark.system
COLOCATED = ("placement=colocated", "queue.staleness.max_staleness=0", "sync.verify_every=1", AGREES)
ENDURING = ("trainer.max_restarts=9", "engines.restarts=9", "run.controller_restarts=9", "trainer.checkpoint_every=2")
PARTS = ("trainer_out", "engines_in", "update", "engines_drain", "engines_out", "trainer_in")
ROLES = ("trainer.1", "engine.0", "controller")


def turns(directory: Path) -> list[str]:
    """The states that the controller has passed to, of all its starts."""
    return re.findall(r"devices in turn: \w+, so (\w+)", (directory / "logs" / "controller.log").read_text())


def test_engines_and_trainer_take_turns(tmp_path: Path) -> None:
    run(tmp_path / "run", *COLOCATED, "run.steps=4", "engines.tp=2", "trainer.tp=2")
    taken = turns(tmp_path / "run")
    cycle = [DeviceTurn.WAKING, DeviceTurn.GENERATING, DeviceTurn.DRAINING, DeviceTurn.ASLEEP, DeviceTurn.TRAINING]
    assert taken == [*cycle[2:], *cycle * 4]
    steps = [one for one in metrics(tmp_path / "run") if one["phase"] == "rl"]
    assert all(one["staleness_max"] == 0 and min(one["switch_seconds"][part] for part in PARTS) > 0 for one in steps)


@pytest.mark.thorough
@pytest.mark.parametrize("role", ROLES)
def test_a_process_lost_in_any_state_costs_nothing(tmp_path: Path, role: str) -> None:
    directory, steps = tmp_path / "run", 150
    shape = [one for one in trained_once.SHAPE if not one.startswith("run.steps")]
    command = start(directory, *COLOCATED, *ENDURING, *shape, f"run.steps={steps}")
    assert wait_for(lambda: len(metrics(directory)) > WARM + 1, 150)
    for state in DeviceTurn:
        assert wait_for(lambda: any(one.role == role and processes.runs(one) for one in processes.read(directory)), 90), state
        before = len(turns(directory))
        assert wait_for(lambda: state in turns(directory)[before:], 120, 0.002), (state, turns(directory)[before:])  # noqa: B023
        process(directory, role).kill()
        last = metrics(directory)[-1]["step"]
        assert wait_for(lambda: metrics(directory)[-1]["step"] > last, 150), state  # noqa: B023
    command.succeed(300.0, directory)
    trained_once.exact(directory, steps)
    assert {one["step"] for one in metrics(directory)} == {*range(1, WARM + steps + 1)}
