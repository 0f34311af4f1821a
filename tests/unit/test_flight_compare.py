"""Comparing records: one planted change is found where it was planted, and of several the one that comes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.config.schema import Config
from asyncmoe.errors import DataError
from asyncmoe.flight.compare import first_difference, reasons, relative_differences
from asyncmoe.flight.records import Started, StepRecords, TrainedStep
from asyncmoe.flight.verdict import sentence

TENSORS = ("embedding", "layer.0.attention", "layer.0.experts.3", "head")
STEPS = range(4, 8)
ORDER = ("inputs", "schedule", "advantages", "lr", "refused", "loss", "gradient", "grad_norm", "weights", "optimizer")
"""The recorded fields, as they are compared in a step with one update."""


def _record(seed: int, updates: int, fillers: int = 2) -> StepRecords:
    random, made, start = np.random.default_rng(seed), {}, Started(0, {}, {}, TENSORS, True)
    schedule = tuple((((3 * u,), (3 * u + 1, 3 * u + 2)), ((),) * fillers) for u in range(updates))
    for step in STEPS:
        advantages = random.normal(size=3 * updates).astype("<f4").tobytes()
        loss, norm = random.random((2, updates)).tolist()
        *gradient, weights, optimizer = [random.integers(1, 1 << 63, len(TENSORS), dtype="<u8").tobytes() for _ in range(updates + 2)]
        decided = (f"{step:016x}", schedule, (False,) * updates, advantages, 0.1 / step)
        made[step] = TrainedStep(step, *decided, tuple(loss), tuple(norm), tuple(gradient), weights, optimizer)
    return StepRecords(made, dict.fromkeys(STEPS, start))


def _flipped(values: bytes, dtype: str, at: set[int]) -> bytes:
    """Flip the lowest bit of some elements."""
    bits = np.frombuffer(values, dtype).copy()
    bits[sorted(at)] ^= 1
    return bits.tobytes()


def _change(record: StepRecords, step: int, what: str, update: int, at: set[int]) -> StepRecords:
    """Plant the smallest change in a part: in update `update`, or in elements `at`."""
    field, old = "items" if what == "inputs" else what, record.steps[step]
    value: Any = getattr(old, field)
    if what in ("inputs", "lr"):
        value = np.nextafter(value, 1).item() if what == "lr" else value[::-1]
    elif isinstance(value, bytes):
        value = _flipped(value, "<u4" if what == "advantages" else "<u8", at)
    else:
        changes: dict[str, Any] = {"schedule": lambda ranks: ranks[::-1], "refused": lambda one: not one}
        changes["gradient"] = lambda one: _flipped(one, "<u8", at)
        change = changes.get(what, lambda one: np.nextafter(one, 9).item())
        value = tuple(change(one) if u == update else one for u, one in enumerate(value))
    made = msgspec.structs.replace(old, **{field: value})
    return StepRecords({**record.steps, step: msgspec.json.decode(msgspec.json.encode(made), type=TrainedStep)}, record.starts)


def _where(what: str, update: int, at: set[int], updates: int) -> tuple[str, ...]:
    every = [f"update {update}"] if what in ("refused", "loss", "grad_norm") and updates > 1 else []
    every = [TENSORS[i] for i in sorted(at)] if what in ("gradient", "weights", "optimizer") else every
    parts = {"schedule": range(3 * update, 3 * update + 3), "advantages": sorted(at)}
    return tuple(map(str, parts.get(what, every)))


@pytest.mark.parametrize("first", ORDER)
@given(st.data(), st.integers(0, 99), st.integers(1, 2), st.sampled_from(STEPS))
def test_a_planted_change_is_found_whatever_differs_after_it(first: str, data: st.DataObject, seed: int, updates: int, step: int) -> None:
    record = other = _record(seed, updates)
    assert first_difference(record, _record(seed, updates, fillers=3), STEPS) is None
    update = data.draw(st.integers(0, updates - 1))
    at = data.draw(st.sets(st.integers(0, 2), min_size=1))
    later = data.draw(st.sets(st.sampled_from(ORDER[ORDER.index(first) :])))
    for what in later | {first}:
        other = _change(other, step, what, update, at)
    found = first_difference(record, other, STEPS)
    assert found is not None
    assert (found.step, found.what, found.where, found.got == found.expected) == (step, first, _where(first, update, at, updates), False)
    assert first_difference(other, record, STEPS) == replace(found, expected=found.got, got=found.expected)
    named = (f"step {step}", *found.where[:1], "group 7 alone" if first == "advantages" else "")
    assert all(part in sentence(found, groups=[7, 7, 7, 8, 8, 8]) for part in named)


def _first(record: StepRecords, other: StepRecords, steps: range = STEPS) -> tuple[str, tuple[str, ...]]:
    found = first_difference(record, other, steps)
    return ("", ()) if found is None else (found.what, found.where)


def test_weights_before_are_those_after_the_step_before() -> None:
    record = _record(0, 1)
    other = _change(_change(record, 5, "weights", 0, {2}), 6, "loss", 0, set())
    assert _first(record, other) == ("weights", TENSORS[2:3])
    assert _first(record, other, range(6, 7)) == ("weights before", TENSORS[2:3])
    assert _first(record, StepRecords({6: other.steps[6]}, other.starts), range(6, 7)) == ("loss", ())


def test_a_gradient_comes_before_the_later_updates_that_it_changes() -> None:
    record = other = _record(0, 2)
    for what, update in (("gradient", 0), ("grad_norm", 0), ("loss", 1)):
        other = _change(other, 5, what, update, {1})
    assert _first(record, other) == ("gradient", TENSORS[1:2])


def test_micro_batches_of_another_layout_are_no_difference() -> None:
    record = _record(0, 1)
    other = _change(record, 5, "schedule", 0, set())
    starts = dict.fromkeys(STEPS, Started(0, {}, {"trainer.tp": "2"}, TENSORS, True))
    assert first_difference(record, other, STEPS) is not None
    assert first_difference(record, StepRecords(other.steps, starts), STEPS) is None


def test_numbers_that_are_not_finite_or_zero_are_compared_by_their_bits() -> None:
    def losing(loss: float | None) -> StepRecords:
        return StepRecords({4: msgspec.structs.replace(_record(0, 1).steps[4], loss=(loss,))}, _record(0, 1).starts)

    values = (None, 0.0, -0.0, 1.0)
    equal = [[first_difference(losing(a), losing(b), range(4, 5)) is None for b in values] for a in values]
    assert equal == np.eye(4, dtype=bool).tolist()
    relative = [relative_differences(losing(1.0), losing(b), range(4, 5)) for b in (1.0, 0.75, None)]
    assert relative == [(0.0, 0.0), (0.25, 0.0), (np.inf, 0.0)]


def test_another_model_and_a_step_without_a_record_are_refused() -> None:
    record, start = _record(0, 1), Started(0, {}, {}, (*TENSORS, "adapter"), True)
    for other, steps in ((StepRecords(record.steps, dict.fromkeys(STEPS, start)), STEPS), (record, range(7, 9))):
        with pytest.raises(DataError, match=r"adapter|step 8"):
            first_difference(record, other, steps)


def test_reasons_begin_with_the_layout_and_leave_out_what_decides_nothing() -> None:
    def started(threads: str, **sections: dict[str, Any]) -> Started:
        values = Config.model_validate({"run": {"dir": "a", "steps": 3}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}} | sections)
        return Started(0, values.model_dump(mode="json"), {"threads": threads, "code": "abc"}, TENSORS, True)

    one = started("2", trainer={"ranks": 2, "tp": 2})
    two = started("1", trainer={"timeout_s": 9, "dtype": "float32"}, objective={"clip_low": 0.1}, run={"dir": "b", "steps": 3})
    assert reasons(one, one) == []
    layout = ["trainer.ranks: 2 then, 1 here", "trainer.tp: 2 then, 1 here"]
    assert reasons(one, two) == [*layout, "threads: 2 then, 1 here", "objective.clip_low: 0.2 then, 0.1 here"]
