"""Compares two records of the same steps, of two runs or of a run and its replay, and finds the first difference: causes before effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from asyncmoe.config.fields import said
from asyncmoe.config.schema import LAYOUT
from asyncmoe.errors import DataError
from asyncmoe.flight.records import Started, StepRecords
from asyncmoe.telemetry.loggers.points import flat

What = Literal[
    "inputs", "schedule", "weights before", "advantages", "lr", "refused", "loss", "gradient", "grad_norm", "weights", "optimizer"
]
"""Parts of a step, each before what follows from it. Those from `refused` to `grad_norm` are compared update by update."""
_ABSENT = "none"
_LAYOUT = {f"{section}.{key}" for section, keys in LAYOUT.items() for key in keys}
_SECTIONS = {"train", "lora", "trainer", "model", "keep", "warmup", "objective", "verify"}
_KEYS = {"run.steps", "run.seed", "run.deterministic", "rollout.temperature", "rollout.max_new_tokens"}
"""These sections and keys of the configuration decide what a step makes of a batch."""
_SAVES = ("checkpoint_every", "async_save", "keep_checkpoints", "keep_every", "checkpoint_copy", "timeout_s", "max_restarts")
_NOT = {"model.path", "model.trust_remote_code", "lora.start", *(f"trainer.{key}" for key in (*_SAVES, "dtype", "optimizer.distributed"))}
"""Keys of the sections that do not, or whose meaning on the machine is among the circumstances."""


@dataclass(frozen=True)
class Difference:
    """The first difference between a record and another one.

    Attributes:
        what: the part of the step; all parts before it are equal.
        where: the tensors that differ, in the order of the forward pass, or, of the schedule and the advantages, the trajectories'
            positions in the batch, or, in a step of several, the update: "update 0". () for what has no parts.
        expected, got: the record's value and the other's at the first of these; a tensor's is its digest.
    """

    step: int
    what: What
    where: tuple[str, ...]
    expected: str
    got: str


def first_difference(recorded: StepRecords, other: StepRecords, steps: range) -> Difference | None:
    """Return the first difference in some steps, or None if they are equal to the last bit.

    Raises:
        DataError: a step has no record in one of the two, or its model has other tensors.
    """
    for step in steps:
        _check(recorded, other, step)
        for what, named, one, two in _parts(recorded, other, step):
            if repr(one) == repr(two) or b"" in (one, two):  # floats by their bits: -0.0 is not 0.0; no digests are no difference
                continue
            expected, got = named(one), named(two)
            if where := [name for name in {**expected, **got} if expected.get(name) != got.get(name)]:
                values = expected.get(where[0], _ABSENT), got.get(where[0], _ABSENT)
                return Difference(step, what, tuple(name for name in where if name), *values)
    return None


def relative_differences(recorded: StepRecords, other: StepRecords, steps: range) -> tuple[float, float]:
    """Return how far another layout is from the record, over steps that both have: the largest |a - b| / max(|a|, |b|) of the loss and of
    the gradient norm of an update; infinite if one of a and b is not finite."""
    pairs = [(recorded.steps[step], other.steps[step]) for step in steps]
    loss = [_relative(*both) for one, two in pairs for both in zip(one.loss, two.loss, strict=False)]
    norm = [_relative(*both) for one, two in pairs for both in zip(one.grad_norm, two.grad_norm, strict=False)]
    return max(loss, default=0.0), max(norm, default=0.0)


def reasons(then: Started, here: Started, names: tuple[str, str] = ("then", "here")) -> list[str]:
    """Return in what two starts differ of all that decides a step's bits: layout, then circumstances, then other keys of the configuration.
    An entry: "trainer.tp: 2 then, 1 here"; `names`: what to call the two."""
    one, two = _deciding(then), _deciding(here)
    values = [(name, said(one.get(name, _ABSENT)), said(two.get(name, _ABSENT))) for name in {**one, **two}]
    return [f"{name}: {former} {names[0]}, {value} {names[1]}" for name, former, value in values if former != value]


Named = Callable[[Any], Mapping[str, str]]
"""Returns values by the name under which `Difference.where` has them; "": no name."""


def _parts(recorded: StepRecords, other: StepRecords, step: int) -> Iterator[tuple[What, Named, Any, Any]]:
    """Yield the parts of a step with both values, in the order of `What`."""
    one, two, tensors = recorded.steps[step], other.steps[step], partial(_digests, recorded.starts[step].tensors)
    yield "inputs", _single, one.items, two.items
    if recorded.starts[step].sizes == other.starts[step].sizes:
        yield "schedule", _places, one.schedule, two.schedule
    if (before := recorded.steps.get(step - 1)) is not None and (others := other.steps.get(step - 1)) is not None:
        yield "weights before", tensors, before.weights, others.weights
    yield "advantages", _advantages, one.advantages, two.advantages
    yield "lr", _single, one.lr, two.lr
    for update in range(len(one.schedule)):
        named = partial(_single, name=f"update {update}" if len(one.schedule) > 1 else "")
        yield "refused", named, one.refused[update], two.refused[update]
        yield "loss", named, one.loss[update], two.loss[update]
        yield "gradient", tensors, one.gradient[update], two.gradient[update]
        yield "grad_norm", named, one.grad_norm[update], two.grad_norm[update]
    yield "weights", tensors, one.weights, two.weights
    yield "optimizer", tensors, one.optimizer, two.optimizer


def _single(value: object, name: str = "") -> Mapping[str, str]:
    return {name: "not finite" if value is None else said(value)}


def _digests(tensors: Sequence[str], digests: bytes) -> Mapping[str, str]:
    return dict(zip(tensors, [f"{one:016x}" for one in np.frombuffer(digests, "<u8")], strict=False))  # none of a refused update


def _advantages(values: bytes) -> Mapping[str, str]:
    return {str(i): str(one) for i, one in enumerate(np.frombuffer(values, "<f4"))}


def _places(schedule: Sequence[Sequence[Sequence[Sequence[int]]]]) -> Mapping[str, str]:
    places = {
        position: f"place {place} of micro-batch {number} of rank {rank} in update {update}"
        for update, ranks in enumerate(schedule)
        for rank, microbatches in enumerate(ranks)
        for number, positions in enumerate(microbatches)
        for place, position in enumerate(positions)
    }
    return {str(position): places[position] for position in sorted(places)}


def _check(recorded: StepRecords, other: StepRecords, step: int) -> None:
    for one in (recorded, other):
        if step not in one.steps:
            there = f"{min(one.steps)} to {max(one.steps)}" if one.steps else "none"
            raise DataError(f"step {step}", got=f"no record of it (steps with records: {there})", expected="a step that both runs trained")
    mine, others = recorded.starts[step].tensors, other.starts[step].tensors
    if mine != others and mine and others:
        alone = next((name for name in (*others, *mine) if (name in mine) != (name in others)), None)
        got = f"another model: only one of the two has {alone}" if alone else "the same tensors in another order"
        raise DataError(f"step {step}", got=got, expected=f"the {len(mine)} tensors that were recorded")


def _relative(one: float | None, two: float | None) -> float:
    if one is None or two is None:
        return 0.0 if one is two else np.inf
    return abs(one - two) / max(abs(one), abs(two)) if one != two else 0.0


def _deciding(start: Started) -> dict[str, Any]:
    """Return by name, likely reasons for a difference first, what the bits of a step depend on."""
    keys = {key: value for key, value in flat(start.config).items() if key not in _NOT}
    layout = {key: keys.pop(key) for key in list(keys) if key in _LAYOUT}
    others = {key: value for key, value in keys.items() if key in _KEYS or key.partition(".")[0] in _SECTIONS}
    return {**layout, **start.circumstances, **others}
