"""What the kernels of deltas do, run on the CPU by the functions they are made of, against the CPU's own: bytes, sums, faults."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from delta_ranks import change
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reshard_cuda_emulated import aligned

import asyncmoe.reshard._C as _C
from tests.unit.example_counts import examples

DENSITIES = (0.0, 1e-9, 0.002, 0.02, 0.4, 0.6, 1.0)
SLACK = 64
"""Bytes around what may be written, which must not change."""


@dataclass(frozen=True, eq=False)
class Message:
    """A message of rows of mixed items, each a tensor of its own in a storage of gaps.

    Attributes:
        held: bytes of the storage.
    """

    table: _C.DeltaTable
    pack: _C.Program
    nbytes: int
    held: int


def message_of(boxes: list[tuple[int, tuple[int, int], int]]) -> Message:
    """Of (item, (rows, columns), elements left out after each row)."""
    stored, packed = [], []
    at = place = 0
    for number, (item, (rows, columns), gap) in enumerate(boxes):
        place += -place % item
        shape, tensor = (1, 1, rows, columns), (0, 0, 3 * columns * item, item)
        wire, box = (0, 0, columns * item, item), (0, 0, (columns + gap) * item, item)
        stored.append([number, 5 * item, 0, place, item, *shape, *tensor, *box])
        packed.append([0, place, 0, at, item, *shape, *box, *wire])
        at, place = at + rows * columns * item, place + rows * (columns + gap) * item
    firsts, seeds = np.array([0, len(boxes)], np.int64), np.arange(len(boxes), dtype=np.int64) * 977 - 5
    return Message(
        _C.DeltaTable(np.array(stored, np.int64), firsts, seeds), _C.Program(np.array(packed, np.int64), firsts, "destination"), at, place
    )


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def addresses(array: np.ndarray) -> np.ndarray:
    return np.array([address(array)], np.int64)


def noise(nbytes: int, shift: int, generator: np.random.Generator) -> np.ndarray:
    found = aligned(nbytes, shift)
    found[:] = generator.integers(0, 256, nbytes, np.uint8)
    return found


def changed(old: np.ndarray, density: float, generator: np.random.Generator) -> np.ndarray:
    found = old.copy()
    change(found, density, generator)
    return found


Coded = tuple[bytes, int, int]


def on_gpu(message: Message, now: np.ndarray, old: np.ndarray, shift: int = 0) -> Coded:
    """What the kernels code; `old` becomes `now`."""
    room = message.table.bound(0)
    payload = aligned(room + SLACK, shift)
    nbytes, difference, count = _C.emulate_delta_encode(message.table, 0, address(now), address(old), address(payload))
    assert (payload[room:] == 0xAA).all()
    np.testing.assert_array_equal(old, now)
    return payload[:nbytes].tobytes(), difference, count


def on_cpu(message: Message, storage: np.ndarray, old: np.ndarray) -> Coded:
    payload, base = np.zeros(message.table.bound(0), np.uint8), old.copy()
    nbytes, difference, count = _C.encode_delta(message.table, message.pack, 0, addresses(storage), address(base), address(payload), 2)
    again = np.empty_like(base)
    message.pack.run(0, addresses(storage), addresses(again), 1)
    np.testing.assert_array_equal(base, again)
    return payload[:nbytes].tobytes(), difference, count


boxes_of = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.tuples(st.integers(1, 5), st.integers(1, 40)), st.integers(0, 3)), min_size=1, max_size=9
)


@given(
    boxes=boxes_of,
    density=st.sampled_from(DENSITIES),
    shifts=st.tuples(*[st.integers(0, 15)] * 4),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=examples(300), deadline=None)
def test_odd_messages(boxes: list[tuple[int, tuple[int, int], int]], density: float, shifts: tuple[int, ...], seed: int) -> None:
    """Mixed items in a message, so that blocks begin anywhere; memory of any alignment; what is around it stays as it is."""
    message, generator = message_of(boxes), np.random.default_rng(seed)
    before = noise(message.held, 0, generator)
    storage = changed(before, density, generator)
    old, now = (aligned(message.nbytes, shift) for shift in shifts[:2])
    for values, packed in ((before, old), (storage, now)):
        message.pack.run(0, addresses(values), addresses(packed), 1)
    expected = on_cpu(message, storage, old)
    made = on_gpu(message, now, old, shifts[2])
    assert made == expected
    sums = {message.table.read(0, addresses(storage)), message.table.read(0, addresses(storage), address(now))}
    assert sums == {_C.emulate_delta_read(message.table, 0, addresses(storage), at)[1] for at in (0, address(now))}
    assert len(sums) == 1
    payload, difference = np.frombuffer(made[0], np.uint8), made[1]
    held = noise(message.held + SLACK, shifts[3], generator)
    held[: message.held] = before
    kept = held.copy()
    for write in (False, True):
        assert _C.emulate_delta_apply(message.table, 0, address(payload), len(payload), addresses(held), write)[1] == difference
        if not write:
            np.testing.assert_array_equal(held, kept)
    message.table.apply(0, address(payload), len(payload), addresses(kept), True)
    np.testing.assert_array_equal(held, kept)
    repacked = aligned(message.nbytes, 0)
    message.pack.run(0, addresses(held), addresses(repacked), 1)
    np.testing.assert_array_equal(repacked, now)


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_blocks_of_full_size(item: int) -> None:
    """Every density, and gaps of every length of the code, at the edges of threads' shares, batches and blocks."""
    columns = 131072 // item
    message, generator = message_of([(item, (1, columns), 0), (item, (3, columns // 4 + 1), 2)]), np.random.default_rng(item)
    storage = noise(message.held, 0, generator)
    old = aligned(message.nbytes, 0)
    message.pack.run(0, addresses(storage), addresses(old), 1)
    positions = [[0], [columns - 1], [0, 224, 449, 449 + 8159, 449 + 2 * 8160], [*range(0, columns, columns // 256)], [*range(4097)]]
    cases = [*itertools.chain(positions), *(generator.choice(columns, int(d * columns), replace=False) for d in (0.01, 0.3, 0.48, 1.0))]
    for chosen in cases:
        fresh = storage.copy()
        fresh[np.array(chosen)[np.array(chosen) < columns] * item] ^= 1
        now = old.copy()
        message.pack.run(0, addresses(fresh), addresses(now), 1)
        expected = on_cpu(message, fresh, old)
        made = on_gpu(message, now, old.copy())
        assert made == expected
        payload, held = np.frombuffer(made[0], np.uint8), storage.copy()
        assert _C.emulate_delta_apply(message.table, 0, address(payload), len(payload), addresses(held), True)[1] == made[1]
        np.testing.assert_array_equal(held, fresh)
