"""Proof from a run's records that every group was trained once, whatever was lost meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncmoe.log.files import scan
from asyncmoe.queue import records
from asyncmoe.queue.fold import LogState, fold
from asyncmoe.telemetry import processes
from tests.system.runs import json_lines, metrics

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
    return next(one for one in family.children(recursive=True) if part in " ".join(one.cmdline())) if part else family


def passes(directory: Path) -> Iterator[tuple[int, dict[int, dict[str, Any]]]]:
    """Of each start of the trainer: the step it began at, and what it trained, by step: loss and (key, digest) of the trajectories."""
    told, sampled = json_lines(directory / "metrics.jsonl"), json_lines(directory / "samples" / "trainer.jsonl")
    losses: list[tuple[int, dict[int, dict[str, float]]]] = []
    for one in told:
        if "resumed_at" in one:
            losses.append((one["resumed_at"], {}))
        elif one["phase"] == "rl":
            losses[-1][1][one["step"]] = {name: one[name] for name in ("loss", "entropy", "grad_norm")}
    keys: list[dict[int, list[tuple[str, int]]]] = []
    for one in sampled:
        if one["record"] == "begin":
            keys.append({})
        elif one["record"] == "trained":
            keys[-1].setdefault(one["step"], []).append((one["key"], one["digest"]))
    for (begun, each), batches in zip(losses, keys, strict=True):
        yield begun, {step: figures | {"keys": sorted(batches[step])} for step, figures in each.items()}


def ledger_adds_up(directory: Path) -> None:
    for one in json_lines(directory / "rollout.jsonl"):
        ended = sum(sum(one[name].values()) for name in ("dropped", "rejected", "requeued"))
        assert one["started"] == one["running"] + one["accepted"] + ended, one


def told_by_log(directory: Path) -> LogState:
    """What the log of a run tells, which is not damaged."""
    found = list(scan(directory / "log" / "0"))
    assert not [begin for begin, _, data in found if data is None]
    return fold((at, records.entry(data)) for at, _, data in found if data is not None)


def check(directory: Path, count: int = 9, known: LogState | None = None, *, again: bool = True) -> None:
    """Prove from the records that everything was trained once.

    Args:
        known: what the log tells; None: it is in the run's folder.
        again: whether some steps must have been trained again.
    """
    every = list(passes(directory))
    newest: dict[int, dict[str, Any]] = {}
    replayed = 0
    for begun, steps in every:
        newest = {step: what for step, what in newest.items() if step <= begun} | steps
    first: dict[int, dict[str, Any]] = {}
    for _, steps in every:
        for step, what in steps.items():
            if step in first:
                replayed += 1
                assert what["keys"] == first[step]["keys"], f"step {step} was trained on another batch"
                assert what["loss"] == pytest.approx(first[step]["loss"], abs=1e-6)
                assert what["entropy"] == pytest.approx(first[step]["entropy"], abs=1e-5)
            first.setdefault(step, what)
    assert bool(replayed) == again, "steps that were trained again"
    assert min(what["grad_norm"] for what in newest.values()) > 0, "every step changed the weights"
    lineages = [step["lineage"] for step in metrics(directory) if step["phase"] == "rl"]
    assert lineages == sorted(lineages)
    assert (lineages[-1] >= 1) == again
    assert sorted(newest) == list(range(WARM + 1, WARM + 1 + count))
    every_key = [key for what in newest.values() for key, _ in what["keys"]]
    samples = [tuple(key.split(".")[:2]) for key in every_key]
    assert len(samples) == len(set(samples)) == count * 16, "each sample is trained once"
    known = known or told_by_log(directory)
    leased = {number for lease in known.leases.values() for number in lease.numbers}
    assert leased >= {int(key[1:].split(".")[0]) for key in every_key}
    told = json_lines(directory / "samples" / "rollout.jsonl")
    ended = {one["group"] for one in told if one["record"] in ("group", "stale") and one["fate"] in ("dropped", "rejected")}
    assert set(known.groups) | ended == set(range(known.next)), "no prompt is passed over, and each that was asked is in one state"
    asked = [(one["group"], one.get("attempt", 0)) for one in told if one["record"] == "group"]
    assert len(asked) == len(set(asked)), "no group is sampled to its end twice"
    ledger_adds_up(directory)
