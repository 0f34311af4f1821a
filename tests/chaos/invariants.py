"""Invariants after every fault, as pure functions of observations. Each returns violations as text; an empty result is good."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncmoe.queue.fold import LogState

Record = Mapping[str, Any]


def newest(trained: Sequence[Record]) -> dict[int, Record]:
    """Return what each step was trained on in the lineage behind the newest weights, by step.

    Args:
        trained: of each start of the trainer a record with `resumed_at`, followed by one of each step; "damaged" where the log was.
    """
    found: dict[int, Record] = {}
    for one in trained:
        if "resumed_at" in one:
            found = {step: what for step, what in found.items() if step <= one["resumed_at"]}
        elif "step" in one:
            found[one["step"]] = one
    return found


def trained_once(trained: Sequence[Record]) -> Iterator[str]:
    """Every step is trained on the batch of its first time, no sample is in two steps, and no step is skipped."""
    first: dict[int, Record] = {}
    for one in trained:
        if "damaged" in one:
            first.clear()
        if "step" not in one:
            continue
        before = first.setdefault(one["step"], one)
        if (before["keys"], before["digests"]) != (one["keys"], one["digests"]):
            yield f"step {one['step']}: start {one['start']} trained another batch than start {before['start']}"
    lineage = newest(trained)
    if sorted(lineage) != list(range(1, len(lineage) + 1)):
        yield f"steps {sorted(set(range(1, max(lineage) + 1)) - set(lineage))[:5]} were passed over"
    steps: dict[tuple[str, ...], int] = {}
    for step, one in sorted(lineage.items()):
        for key in one["keys"]:
            sample = tuple(key.split(".")[:2])
            if steps.setdefault(sample, step) != step:
                yield f"{key} was trained in steps {steps[sample]} and {step}"


def ledger_exact(rollout: Iterable[Record]) -> Iterator[str]:
    """Everything started is running, accepted, dropped, rejected or requeued."""
    for one in rollout:
        ended = sum(sum(one[name].values()) for name in ("dropped", "rejected", "requeued"))
        if one["started"] != one["running"] + one["accepted"] + ended:
            yield f"ledger: {one['started']} started, {one['running']} running, {one['accepted']} accepted, {ended} ended otherwise"
            return


def groups_of(trained: Sequence[Record]) -> set[int]:
    """Return the groups that were trained."""
    return {int(key[1:].split(".")[0]) for one in newest(trained).values() for key in one["keys"]}


def ended_of(samples: Iterable[Record]) -> set[int]:
    """Return the groups that were dropped or rejected."""
    return {one["group"] for one in samples if one["record"] in ("group", "stale") and one["fate"] in ("dropped", "rejected")}


def nothing_lost(before: LogState | None, now: LogState, trained: Sequence[Record], ended: Collection[int], warm: int = 0) -> Iterator[str]:
    """A group finished at one stop is finished unchanged at the next, or was trained or dropped meanwhile; no prompt is skipped.

    Args:
        before, now: the log at two stops.
        ended: groups that were dropped or rejected until now.
        warm: steps of the warm-up, which the log counts too.
    """
    done = groups_of(trained)
    for number, group in ({} if before is None else before.groups).items():
        if group.place is None or number in ended:
            continue
        after = now.groups.get(number)
        if after is None and number not in done:
            yield f"group {number} was finished, and is gone"
        elif after is not None and after.place != group.place:
            yield f"group {number} was finished at {group.place}, and is now at {after.place}"
    if lost := set(range(now.next)) - set(now.groups) - set(ended) - done:
        yield f"groups {sorted(lost)[:5]} are in no state"
    for at, lease in now.leases.items():
        step = at + 1 - warm
        one = newest(trained).get(step)
        keys = sorted(key for group in lease.terms.groups for key in group.keys) if lease.terms is not None else None
        if one is not None and lease.ended is not None and keys is not None and sorted(one["keys"]) != keys:
            yield f"step {step} was trained on another batch than the log's lease"


@dataclass(frozen=True)
class Said:
    """A run's output since a fault, and the logs of the controller and of the engines' supervisors."""

    supervisor: str
    controller: str

    @property
    def causes(self) -> list[str]:
        """The reasons that the supervisor gave."""
        lines = self.supervisor.splitlines()
        return [line for line in lines if line.startswith("error: ") or line.startswith("the trainer starts again")]


def cause_named(expected: Sequence[str], said: Said) -> Iterator[str]:
    """If the run ended or lost its trainer, its reasons name one of the causes.

    Args:
        expected: regular expressions.
    """
    if said.causes and not any(re.search(one, line) for one in expected for line in said.causes):
        yield f"causes {said.causes}, expected one of {list(expected)}"
