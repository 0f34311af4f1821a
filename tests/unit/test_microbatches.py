"""Micro-batches are packed on demand, one ahead, and equal those of `pack`."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest

from asyncmoe.trainer.data import batch
from asyncmoe.trainer.data.batch import MicroBatch
from asyncmoe.trainer.data.microbatches import MicroBatches
from asyncmoe.trainer.data.schedule import BatchGrid
from tests.unit.test_batch import trajectory

GRID = BatchGrid(tp=2)
LENGTHS: tuple[list[int], ...] = ([3, 4], [5], [], [1, 1, 2])
PARTS = ((0, 1), (2,), (), (3, 4, 5))


def made(count: list[int] | None = None) -> MicroBatches:
    known = {i: trajectory(length, 1, i) for i, length in enumerate(length for one in LENGTHS for length in one)}

    def make(number: int) -> MicroBatch:
        if count is not None:
            count.append(number)
        return batch.pack(known, PARTS[number], advantages=np.zeros(6), weights=np.ones(6), grid=GRID, packed=True)

    rows = [batch.rows_of(lengths, GRID) for lengths in LENGTHS]
    return MicroBatches(make, rows, [batch.places_of(part, lengths, GRID) for part, lengths in zip(PARTS, LENGTHS, strict=True)])


def test_rows_and_places_are_known_before_anything_is_packed() -> None:
    packed: list[int] = []
    batches = made(packed)
    rows, places = batches.rows, batches.places
    assert packed == []
    assert rows == (8, 6, 2, 4)
    assert [(one.rows, one.places) for one in batches] == list(zip(rows, places, strict=True))
    assert packed == [0, 1, 2, 3]


def test_only_the_next_one_is_packed_ahead_and_none_is_kept() -> None:
    packed: list[int] = []
    few = made(packed)
    many = MicroBatches(lambda number: few._make(number % 4), [*few.rows] * 3, [*few.places] * 3)
    batches = iter(many)
    first = weakref.ref(next(batches).tokens)
    assert len(packed) <= 2
    third = [next(batches), next(batches)][1]
    assert len(third.places) == 0
    assert len(packed) <= 4
    assert first() is None
    assert len(list(batches)) == 9


def test_interleaved_chunks_share_what_is_packed_once() -> None:
    packed: list[int] = []
    one, other = made(packed).shared(2)
    pairs = [(next(one), next(one)), (next(other), next(other)), (next(one), next(one)), (next(other), next(other))]
    assert packed == [0, 1, 2, 3]
    assert pairs[0] == pairs[1]
    assert pairs[2] == pairs[3]
    assert [*one, *other] == []


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_what_packing_raises_reaches_whoever_reads_and_no_thread_stays(wrong: int) -> None:
    def make(number: int) -> MicroBatch:
        if number == wrong:
            raise ValueError("routes are cut off")
        return made()._make(number)

    before = threading.active_count()
    batches, seen = MicroBatches(make, made().rows, made().places), []
    with pytest.raises(ValueError, match="routes are cut off"):
        seen += [one for one in batches]  # noqa: C416  what came before is of interest
    assert threading.active_count() == before
