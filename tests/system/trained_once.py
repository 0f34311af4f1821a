"""Proof from a run's records that every group was trained once, whichever processes were lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from asyncmoe.log.files import scan
from asyncmoe.queue import records
from asyncmoe.queue.fold import LogState, fold
from asyncmoe.telemetry import processes
from tests.chaos import invariants, real_world
from tests.system.runs import command_line, json_lines, metrics

SHAPE = ("run.steps=9", "telemetry.samples.groups=4", "trainer.keep_checkpoints=9", "scoring.scorer=tests.unit.scorers:length")
WARM = 4


def trained(directory: Path, before: int, step: int) -> bool:
    """Whether a step was trained after the first `before` records."""
    return any(one["step"] >= step for one in metrics(directory)[before:])


def process(directory: Path, role: str, part: str = "") -> psutil.Process:
    """A process that the run has recorded, and that runs; with `part`, that process among those it started whose command line has it."""
    (found,) = [one for one in processes.read(directory) if one.role == role]
    assert processes.runs(found), f"{role} does not run"
    family = psutil.Process(found.pid)
    return next(one for one in family.children(recursive=True) if part in command_line(one)) if part else family


def told_by_log(directory: Path) -> LogState:
    """Return the state in a run's log, which must be undamaged."""
    found = list(scan(directory / "log" / "0"))
    assert not [begin for begin, _, data in found if data is None]
    return fold((at, records.entry(data)) for at, _, data in found if data is not None)


def check(directory: Path, count: int) -> None:
    """Prove from the records that everything was trained once, although some steps were retrained, to the same bits."""
    exact(directory, count)
    steps = [step for step in metrics(directory) if step["phase"] == "rl"]
    assert len(steps) > len({step["step"] for step in steps}), "steps that were trained again"
    assert min(step["grad_norm"] for step in steps) > 0, "every step changed the weights"


def exact(directory: Path, count: int) -> None:
    """Prove from the records that everything was trained once, and steps that were trained again to the same bits."""
    batches, told = real_world.trained(directory), json_lines(directory / "samples" / "rollout.jsonl")
    ended = invariants.ended_of(told)
    found = [*invariants.trained_once(batches), *invariants.ledger_exact(json_lines(directory / "rollout.jsonl"))]
    found += invariants.nothing_lost(None, told_by_log(directory), batches, ended, WARM)
    assert not found, found
    assert sorted(invariants.newest(batches)) == list(range(1, 1 + count))
    asked = [(one["group"], one.get("attempt", 0)) for one in told if one["record"] == "group"]
    assert len(asked) == len(set(asked)), "no group is sampled to its end twice"
    steps = [step for step in metrics(directory) if step["phase"] == "rl"]
    first: dict[int, dict[str, Any]] = {}
    for step in steps:
        before = first.setdefault(step["step"], step)
        assert (step["loss"], step["entropy"], step["lineage"]) == (before["loss"], before["entropy"], 0), "the same bits"
