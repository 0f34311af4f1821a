"""Says in sentences how the records of two runs differ, and what a replay found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from asyncmoe.flight import compare
from asyncmoe.flight.agreement import StaleTokens
from asyncmoe.flight.compare import Difference, What
from asyncmoe.flight.records import StepRecords
from asyncmoe.flight.source import ranges
from asyncmoe.flight.stage import StepFinding
from asyncmoe.rpc.item import Item

_CAUSES: Mapping[What, tuple[str, str]] = {
    "inputs": ("the batch differs", "other trajectories were leased"),
    "schedule": ("micro-batches differ", "the batch is equal, so their size or the layout is another"),
    "weights before": ("the weights before the step differ", "look at earlier steps"),
    "advantages": ("advantages differ", "the batch is equal, so their computation is another"),
    "lr": ("the learning rate differs", "its schedule is another"),
    "refused": ("the refusal of an update differs", "the rules of verify, or the values they judge, are others"),
    "loss": ("the loss differs", "batch, weights and advantages are equal, so the forward pass or the loss function is another"),
    "gradient": ("the gradient differs", "everything before it is equal, so the backward pass or a reduction is another"),
    "grad_norm": ("the gradient norm differs", "gradients are equal, so its summation is another"),
    "weights": ("the weights after the step differ", "gradients are equal, so clipping or the optimizer, or its earlier state, is another"),
    "optimizer": ("the optimizer's state differs", "gradients and weights are equal, so the optimizer is another"),
}
"""What a difference is, and what follows from all before it being equal."""

Items = Callable[[int], Sequence[Item]]
"""Returns the batch of a step (steps taken, it included); () if it is not known."""


def verdict(
    recorded: StepRecords,
    other: StepRecords,
    steps: range,
    items: Items,
    findings: Sequence[StepFinding] = (),
    names: tuple[str, str] = ("then", "here"),
) -> tuple[bool, list[str]]:
    """Return whether some steps are bit-equal, and lines for people.

    Args:
        findings: what a replay found besides.
        names: what to call the two in the reasons.

    Raises:
        DataError: see `compare.first_difference`.
    """
    found = compare.first_difference(recorded, other, steps)
    known = all(one.steps[steps[-1]].weights for one in (recorded, other))
    where = f"step{'s' * (len(steps) > 1)} {ranges(steps)}"
    if found is not None:
        loss, norm = compare.relative_differences(recorded, other, steps)
        why = [f"  {one}" for one in compare.reasons(recorded.starts[found.step], other.starts[found.step], names)]
        bound = f"{where}: relative difference of the loss at most {loss:.2g}, of the gradient norm {norm:.2g}"
        lines = [sentence(found, [item.group for item in items(found.step)]), *why, bound]
    elif known:
        lines = [f"{where}: bit-equal (losses, gradients, weights, optimizer)"]
    else:
        lines = [f"{where}: losses and gradient norms are equal; nothing is known of the rest, because not both were deterministic"]
    stale = [at for one in findings for at in one.stale]
    return found is None and known and not stale, [*lines, *_stale(stale, items), *_tensors(findings)]


def sentence(difference: Difference, groups: Sequence[int] = ()) -> str:
    """Return a difference as a sentence for people.

    Args:
        groups: group of each trajectory of the step's batch.
    """
    (head, why), where, values = _CAUSES[difference.what], difference.where, f"{difference.got}, expected {difference.expected}"
    if difference.what in ("schedule", "advantages"):
        head += f" for trajectory {_some(where)}"
        if groups:
            head += f", of group {_some([str(one) for one in dict.fromkeys(groups[int(i)] for i in where)])}"
        head += f": {where[0]} has {values}"
    elif difference.what in ("weights before", "gradient", "weights", "optimizer"):
        head += f" in {_some(where)}"
        if difference.what == "gradient" and len(where) > 1:
            head += f"; the backward pass comes to {where[-1]} first"
    else:
        head += f"{f' in {where[0]}' if where else ''}: {values}"
    return f"step {difference.step}: {head}; {why}"


def _some(names: Sequence[str]) -> str:
    return f"{names[0]} alone" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _stale(stale: Sequence[StaleTokens], items: Items) -> Iterator[str]:
    """Yield a line for each version that an engine claimed wrongly."""
    for version, each in groupby(sorted(stale, key=attrgetter("claimed", "step")), attrgetter("claimed")):
        at, *more = each
        key = items(at.step)[at.position].key
        which = f"tokens {at.tokens[0]} to {at.tokens[1] - 1} of {key} in step {at.step}, and {len(more)} more parts"
        yield f"an engine served version {version - 1} as {version}: {which}, are {at.before:.2g} nats from it, not {at.difference:.2g}"


def _tensors(findings: Sequence[StepFinding]) -> Iterator[str]:
    """Yield a line for each step whose weights differ from a checkpoint's."""
    for one in findings:
        if one.tensors:
            worst = max(one.tensors, key=lambda tensor: tensor.largest / (tensor.magnitude or 1.0))
            share = f"{worst.largest / (worst.magnitude or 1.0):.2g} of its largest weight, elements {worst.first} to {worst.last}"
            yield f"weights after step {one.step}: {len(one.tensors)} tensors differ, most in {worst.name} ({share})"
