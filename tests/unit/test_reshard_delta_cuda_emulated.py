"""What the kernels of deltas do, run on the CPU by the functions they are made of, against the CPU's own: bytes, sums, faults."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reshard_cuda_emulated import aligned
from test_reshard_delta_code import BAD_PAYLOADS, HALF

import asyncmoe.reshard._C as _C
from tests.unit.example_counts import examples

DENSITIES = (0.0, 1e-9, 0.002, 0.02, 0.4, 0.6, 1.0)
SLACK = 64
"""Bytes around what may be written, which must not change."""


@dataclass(frozen=True, eq=False)
class Message:
    """A message of rows of mixed items, each a tensor of its own in a storage of gaps.

    Attributes:
        sent, stored: the tables of its elements in the message, and in the storage.
        held: bytes of the storage.
    """

    sent: _C.DeltaTable
    stored: _C.DeltaTable
    pack: _C.Program
    nbytes: int
    held: int


def message_of(boxes: list[tuple[int, tuple[int, int], int]]) -> Message:
    """Of (item, (rows, columns), elements left out after each row)."""
    sent, stored, packed = [], [], []
    at = place = 0
    for number, (item, (rows, columns), gap) in enumerate(boxes):
        place += -place % item
        shape, tensor = (1, 1, rows, columns), (0, 0, 3 * columns * item, item)
        wire, box = (0, 0, columns * item, item), (0, 0, (columns + gap) * item, item)
        sent.append([number, 5 * item, 0, at, item, *shape, *tensor, *wire])
        stored.append([number, 5 * item, 0, place, item, *shape, *tensor, *box])
        packed.append([0, place, 0, at, item, *shape, *box, *wire])
        at, place = at + rows * columns * item, place + rows * (columns + gap) * item
    firsts, seeds = np.array([0, len(boxes)], np.int64), np.arange(len(boxes), dtype=np.int64) * 977 - 5
    tables = [_C.DeltaTable(np.array(table, np.int64), firsts, seeds) for table in (sent, stored)]
    return Message(*tables, _C.Program(np.array(packed, np.int64), firsts, "destination"), at, place)


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
    chosen = generator.random(len(old)) < density
    if density and not chosen.any():
        chosen[generator.integers(len(old))] = True
    found[chosen] ^= generator.integers(1, 256, int(chosen.sum()), np.uint8)
    return found


def on_gpu(message: Message, now: np.ndarray, old: np.ndarray, shift: int = 0) -> tuple[bytes, int, int, int]:
    room = message.sent.bound(0)
    payload = aligned(room + SLACK, shift)
    nbytes, difference, count, dense = _C.emulate_delta_encode(message.sent, 0, address(now), address(old), address(payload))
    assert nbytes <= room
    assert (payload[room:] == 0xAA).all()
    return payload[:nbytes].tobytes(), difference, count, dense


def on_cpu(message: Message, storage: np.ndarray, old: np.ndarray) -> tuple[bytes, int, int, int]:
    frame, *rest = _C.encode_delta(message.sent, message.pack, 0, addresses(storage), address(old), 0, 0, 2)
    return frame.tobytes(), *rest


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
    made = on_gpu(message, now, old, shifts[2])
    assert made == on_cpu(message, storage, old)
    assert _C.emulate_delta_read(message.stored, 0, addresses(storage))[1] == message.stored.read(0, addresses(storage))
    payload, difference = np.frombuffer(made[0], np.uint8), made[1]
    held = noise(message.held + SLACK, shifts[3], generator)
    held[: message.held] = before
    kept = held.copy()
    for write in (False, True):
        assert _C.emulate_delta_apply(message.stored, 0, address(payload), len(payload), addresses(held), write)[1] == difference
        if not write:
            np.testing.assert_array_equal(held, kept)
    message.stored.apply(0, address(payload), len(payload), addresses(kept), True)
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
        made = on_gpu(message, now, old)
        assert made == on_cpu(message, fresh, old)
        payload, held = np.frombuffer(made[0], np.uint8), storage.copy()
        assert _C.emulate_delta_apply(message.stored, 0, address(payload), len(payload), addresses(held), True)[1] == made[1]
        np.testing.assert_array_equal(held, fresh)


def test_padding_that_is_nowhere_holds_zeros() -> None:
    message = message_of([(2, (3, 50), 1), (1, (1, 7), 0)])
    none = np.zeros(1, np.int64)
    assert _C.emulate_delta_read(message.stored, 0, none)[1] == message.stored.read(0, none)


@pytest.mark.parametrize("payload", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS)
def test_payloads_that_do_not_fit_are_found(payload: bytes) -> None:
    """Though a receiver has refused them before a kernel sees them. Nothing outside the storage is read or written."""
    message = message_of([(1, (1, HALF), 0)])
    held = aligned(HALF + SLACK, 0)
    given_payload = np.frombuffer(payload + b"\0" * SLACK, np.uint8)
    with pytest.raises(ValueError, match="got a fault"):
        _C.emulate_delta_apply(message.stored, 0, address(given_payload), len(payload), addresses(held), True)
    assert (held[HALF:] == 0xAA).all()


@given(boxes=boxes_of, seed=st.integers(0, 1 << 32), flips=st.integers(1, 3))
@settings(max_examples=examples(200), deadline=None)
def test_damage_is_found_or_fits(boxes: list[tuple[int, tuple[int, int], int]], seed: int, flips: int) -> None:
    """What the host's check lets through is applied as the CPU does, what it refuses is a fault or written inside the storage only."""
    message, generator = message_of(boxes), np.random.default_rng(seed)
    before = noise(message.held, 0, generator)
    old, now = aligned(message.nbytes, 0), aligned(message.nbytes, 0)
    storage = changed(before, 0.05, generator)
    message.pack.run(0, addresses(before), addresses(old), 1)
    message.pack.run(0, addresses(storage), addresses(now), 1)
    payload = np.frombuffer(on_gpu(message, now, old)[0], np.uint8).copy()
    payload[generator.integers(0, len(payload), flips)] ^= generator.integers(1, 256, flips, np.uint8)
    held = np.concatenate([before, np.full(SLACK, 0xAA, np.uint8)])
    kept = held.copy()
    sound = message.stored.fault(0, address(payload), len(payload)) is None
    try:
        found = _C.emulate_delta_apply(message.stored, 0, address(payload), len(payload), addresses(held), True)[1]
    except ValueError:
        assert not sound
    else:
        assert sound
        assert found == message.stored.apply(0, address(payload), len(payload), addresses(kept), True)
        np.testing.assert_array_equal(held, kept)
    assert (held[message.held :] == 0xAA).all()


def test_a_table_of_other_places_is_refused() -> None:
    message = message_of([(2, (3, 50), 1)])
    now = np.zeros(message.held, np.uint8)
    with pytest.raises(ValueError, match="got a table of other places"):
        _C.emulate_delta_encode(message.stored, 0, address(now), address(now), address(now))
