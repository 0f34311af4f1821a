"""A run that is killed again and again trains every group once, in the batches of the first pass, and asks prompts in their order."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.log.files import scan
from asyncmoe.queue import records
from asyncmoe.queue.fold import LogState, fold
from tests.system.runs import ONE_RANK, Command, logs, marked_pids, metrics, start, wait_for

# By default tests/unit/test_chaos.py resumes a run that ends at seeded moments, with light engines and ranks, and cuts no response by more
# than a piece; test_controller_restarts and test_restarts lose controller, supervisor, engine and rank of a real run, and `check` it.
pytestmark = [pytest.mark.system, pytest.mark.thorough]
SHAPE = ("run.steps=9", "telemetry.samples.groups=4", "trainer.keep_checkpoints=9", "scoring.scorer=tests.unit.scorers:length")
ENDS = ("trainer.max_restarts=0", "run.controller_restarts=0", "engines.orphan_s=5")
"""Of a run that ends as a whole when one of its processes is lost."""
WARM = 4
TARGETS = {"supervisor": "asyncmoe run", "controller": "asyncmoe rollout", "rank": "asyncmoe.trainer"}


def kill(command: Command, target: str) -> None:
    """Send SIGKILL to one process of a run, and wait until all have ended."""
    os.kill(marked_pids(command.mark, TARGETS[target])[0], signal.SIGKILL)
    assert command.gone(60), command.alive()


def trained(directory: Path, before: int, step: int) -> bool:
    """Whether a step was trained after the first `before` records."""
    return any(one["step"] >= step for one in metrics(directory)[before:])


def passes(directory: Path) -> Iterator[tuple[int, dict[int, dict[str, Any]]]]:
    """Of each start of the trainer: the step it began at, and what it trained, by step: loss and (key, digest) of the trajectories."""
    told = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().split("\n") if line.endswith("}")]
    sampled = [json.loads(line) for line in (directory / "samples" / "trainer.jsonl").read_text().split("\n") if line.endswith("}")]
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
    for line in (directory / "rollout.jsonl").read_text().splitlines():
        if not line.endswith("}"):
            continue
        one = json.loads(line)
        ended = sum(sum(one[name].values()) for name in ("dropped", "rejected", "requeued"))
        assert one["started"] == one["running"] + one["accepted"] + ended, one


@pytest.mark.parametrize(
    ("targets", "every"),
    [(("controller",), 0), (("rank", "supervisor", "controller"), 5)],
)
def test_a_run_killed_at_seeded_moments_trains_everything_once(tmp_path: Path, targets: tuple[str, ...], every: int) -> None:
    draw, at = random.Random(len(targets)), WARM + 1
    directory, shape = tmp_path / "run", (*SHAPE, f"trainer.checkpoint_every={every}")
    for target in targets:
        command = start(directory, *shape, *ENDS)
        at = min(at + draw.randrange(1, 3), WARM + 8)
        assert wait_for(partial(trained, directory, len(metrics(directory)), at), 150), logs(directory)
        kill(command, target)
    command = start(directory, *shape)
    status, _, error = command.finish()
    assert status == 0, error[-3000:] + logs(directory)
    check(directory)


def test_unfinished_responses_go_on_from_their_last_piece(tmp_path: Path) -> None:
    """Responses of 120 tokens in pieces of 20, on an engine with room for few: most are under way at the kill."""
    directory = tmp_path / "run"
    untaught = ("warmup.lr=1e-9", "run.steps=3")  # a random model hardly ever ends a response
    few = ("rollout.max_new_tokens=120", "log.piece_tokens=20", "rollout.max_concurrent=8")
    shape = (*SHAPE, *ENDS, *ONE_RANK, *untaught, *few)
    command = start(directory, *shape)

    def recorded() -> bool:
        return trained(directory, 0, WARM + 1) and sum(path.stat().st_size for path in (directory / "log" / "1.turns").iterdir()) > 3e4

    assert wait_for(recorded, 150), logs(directory)
    time.sleep(2.0)  # an answer is on disk a second after it came
    kill(command, "controller")
    assert command.finish()[0] != 0
    command = start(directory, *shape)
    status, _, error = command.finish()
    assert status == 0, error[-3000:] + logs(directory)
    told = [json.loads(line) for line in (directory / "rollout.jsonl").read_text().split("\n") if line.endswith("}")]
    assert told[-1]["recalled_tokens"] > 100, told[-1]
    assert told[-1]["rejected"] == {}, told[-1]
    check(directory, count=3)


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
    told = [json.loads(line) for line in (directory / "samples" / "rollout.jsonl").read_text().split("\n") if line.endswith("}")]
    ended = {one["group"] for one in told if one["record"] in ("group", "stale") and one["fate"] in ("dropped", "rejected")}
    assert set(known.groups) | ended == set(range(known.next)), "no prompt is passed over, and each that was asked is in one state"
    asked = [(one["group"], one.get("attempt", 0)) for one in told if one["record"] == "group"]
    assert len(asked) == len(set(asked)), "no group is sampled to its end twice"
    ledger_adds_up(directory)
