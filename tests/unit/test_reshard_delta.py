"""The delta codec: several versions in a row against full exchanges, and doubtful, damaged or hostile input. Over transports:
test_delta_updates.py."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from delta_ranks import Ranks, change
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_ranks import Arrays, ThreadTransport, Wires, blank, filled, numbered, single
from test_reshard_random import Shapes, cases

from asyncmoe.errors import InvariantBroken, LayoutError, TransferError
from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, RankLayout, plan
from asyncmoe.reshard.layout import whole
from tests.unit.example_counts import examples

DENSITIES = (0.0, 1e-9, 0.001, 0.01, 0.5, 1.0)
"""Of changed elements; 1e-9 is a single one."""
Case = tuple[Shapes, list[RankLayout], list[RankLayout]]
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
HALF = 100


def apart(case: Case) -> Case:
    """Destinations that are other ranks than the sources: what a rank copies from itself is no message."""
    shapes, source, destination = case
    return shapes, source, [layout.at(10 + layout.rank) for layout in destination]


def ranks_of(case: Case, values: Arrays, **how: Any) -> Ranks:
    shapes, source, destination = case
    sources = {layout.rank: filled(layout, values) for layout in source}
    return Ranks(plan(shapes, source, destination), sources, {layout.rank: blank(layout) for layout in destination}, **how)


def step(ranks: Ranks, case: Case, values: Arrays, density: float, generator: np.random.Generator) -> None:
    """Change a share of each tensor, in all sources."""
    for tensor in values.values():
        change(tensor, density, generator)
    for layout in case[1]:
        for name, array in filled(layout, values).items():
            ranks.sources[layout.rank][name][...] = array


@given(
    cases().map(apart),
    st.integers(0, 1 << 32),
    st.lists(st.sampled_from(DENSITIES), min_size=1, max_size=4),
    st.sampled_from([1200, 1 << 20]),
)
@settings(max_examples=examples(120), deadline=None)
def test_versions_in_a_row_are_what_dense_updates_bring(case: Case, seed: int, densities: list[float], bucket_bytes: int) -> None:
    generator, values = np.random.default_rng(seed), numbered(case[0])
    ranks = ranks_of(case, values, bucket_bytes=bucket_bytes)
    ranks.full(1)
    for version, density in enumerate(densities, 2):
        step(ranks, case, values, density, generator)
        ranks.update(version)
        ranks.check(case[0], case[2], slow=True)


def matrix(rank: int, shape: tuple[int, ...], dtype: str = "bfloat16") -> RankLayout:
    return single(rank, "s", "w", whole(shape), dtype)


def large(dtype: str, item: int, rows: int = 700, columns: int = 1000, **how: Any) -> tuple[Ranks, Shapes, RankLayout]:
    """Rows of one rank to columns of another: many blocks of 128 KiB, runs of half a row."""
    builder, half = LayoutBuilder(1, dtype), columns // 2
    for i in range(2):
        builder.place(f"half{i}", (rows, half), [("w", Box((0, half * i), (rows, half)), (0, 0))])
    wanted = builder.build()
    source = {"s": np.random.default_rng(item).integers(0, 256, (rows, columns * item), np.uint8).view(RAW[item])}
    got = {name: np.zeros(s.shape, RAW[item]) for name, s in wanted.storages.items()}
    made = plan({"w": (rows, columns)}, [matrix(0, (rows, columns), dtype)], [wanted])
    return Ranks(made, {0: source}, {1: got}, **{"bucket_bytes": 1 << 19, **how}), {"w": (rows, columns)}, wanted


def one_block(count: int) -> Ranks:
    """A single block of `count` elements of one byte, from rank 0 to rank 1; all are 0."""
    source, got = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
    made = plan({"w": (count,)}, [matrix(0, (count,), "uint8")], [matrix(1, (count,), "uint8")])
    ranks = Ranks(made, {0: {"s": source}}, {1: {"s": got}})
    ranks.full(1)
    return ranks


ITEMS = pytest.mark.parametrize(("dtype", "item"), [("uint8", 1), ("bfloat16", 2), ("float32", 4), ("float64", 8)])


@ITEMS
def test_every_density_of_every_item(dtype: str, item: int) -> None:
    ranks, shapes, wanted = large(dtype, item)
    dense = ranks.sources[0]["s"].nbytes
    ranks.full(1)
    for version, density in enumerate([*DENSITIES, 0.003, 0.1, 0.3, 0.9], 2):
        change(ranks.sources[0]["s"], density, np.random.default_rng(version))
        ranks.update(version)
        assert sum(ranks.senders[0].sizes(1)) <= dense * min(1, 0.002 + (item + 4) / item * density) + 8 * dense / 50_000 + 64
        ranks.check(shapes, [wanted])


def test_destinations_of_equal_layouts_share_base_and_messages() -> None:
    shape, values = (400, 300), np.random.default_rng(5).integers(0, 1 << 16, (400, 300), np.uint16)
    made = plan({"w": shape}, [matrix(0, shape)], [matrix(r, shape) for r in (1, 2, 3)])
    ranks = Ranks(made, {0: {"s": values}}, {r: {"s": np.zeros(shape, np.uint16)} for r in (1, 2, 3)})
    assert ranks.senders[0].base_bytes == values.nbytes
    ranks.full(1)
    change(values, 0.01, np.random.default_rng(6))
    ranks.update(2)
    ranks.check({"w": shape}, [matrix(r, shape) for r in (1, 2, 3)])


def test_a_run_of_other_buckets_is_refused_before_anything_is_sent() -> None:
    ranks = large("bfloat16", 2)[0]
    ranks.full(1)
    ranks.encode(2)
    exchanger = Exchanger(ranks.plan, ThreadTransport(0, Wires()), bucket_bytes=1 << 18, delta=True)
    exchanger.bind(ranks.sources[0])
    with pytest.raises(InvariantBroken, match="coded messages of another plan"):
        exchanger.run(1.0, encoder=ranks.senders[0])


# ---------------------------------------------------------------- what is in doubt


def refused(ranks: Ranks, messages: dict[int, list[np.ndarray]], words: str) -> None:
    """Nothing is written."""
    held = {name: array.copy() for name, array in ranks.destinations[1].items()}
    with pytest.raises(TransferError, match=words):
        ranks.receive(1, messages)
    assert all((held[name] == array).all() for name, array in ranks.destinations[1].items())


def coded(ranks: Ranks, density: float = 0.01, version: int = 2) -> dict[int, list[np.ndarray]]:
    if ranks.senders[0].base is None:
        ranks.full(version - 1)
    change(ranks.sources[0]["s"], density, np.random.default_rng(version))
    ranks.encode(version)
    return ranks.messages(1)


def test_a_flipped_bit_under_a_change_is_found_before_anything_is_written() -> None:
    ranks = large("bfloat16", 2)[0]
    ranks.full(1)
    ranks.sources[0]["s"][3, 5] ^= 0x100
    ranks.destinations[1]["half0"][3, 5] ^= 0x8000
    ranks.encode(2)
    refused(ranks, ranks.messages(1), "does not turn the current memory")
    assert ranks.receivers[1].version is None


def test_memory_that_changes_after_the_proof_is_found_at_commit() -> None:
    ranks = large("bfloat16", 2)[0]
    ranks.receive(1, coded(ranks, 1.0))
    ranks.destinations[1]["half1"][0, 0] ^= 1
    with pytest.raises(TransferError, match="must be full"):
        ranks.receivers[1].commit(2)
    assert ranks.receivers[1].version is None


def test_only_what_is_proved_is_written_and_only_once() -> None:
    ranks = large("bfloat16", 2)[0]
    messages = coded(ranks)
    with pytest.raises(InvariantBroken, match="expected a verified one"):
        ranks.receivers[1].commit(2)
    ranks.receive(1, messages)
    ranks.receivers[1].commit(2)
    with pytest.raises(InvariantBroken, match="expected a verified one"):
        ranks.receivers[1].commit(3)


def test_a_delta_over_the_limit_leaves_no_base() -> None:
    ranks, shapes, wanted = large("bfloat16", 2)
    nbytes = sum(len(one) for one in coded(ranks)[0])
    change(ranks.sources[0]["s"], 0.02, np.random.default_rng(1))
    assert ranks.senders[0].encode(3, limit_bytes=nbytes) is None
    assert (ranks.senders[0].base, ranks.senders[0].sizes(1)) == (None, ())
    ranks.full(3)
    ranks.check(shapes, [wanted])


# ---------------------------------------------------------------- bad input


def test_any_damaged_byte_is_refused() -> None:
    """Every byte of a message, one after the other, in three ways."""
    ranks = one_block(1000)
    ((message,),) = coded(ranks, 0.05).values()
    generator = np.random.default_rng(0)
    for place in range(len(message)):
        for flip in (1, 0x80, int(generator.integers(1, 256))):
            damaged = message.copy()
            damaged[place] ^= flip
            ranks.receivers[1].version = 1
            refused(ranks, {0: [damaged]}, "must be full")


def test_what_any_thread_finds_wrong_is_refused() -> None:
    """Of a message whose blocks several threads share: positions beyond their blocks."""
    ranks = large("bfloat16", 2, rows=3000, bucket_bytes=1 << 24)[0]
    ((message,),) = coded(ranks).values()
    message[len(message) // 2 :] = 0xFF
    refused(ranks, {0: [message]}, "must be full")


def body(*entries: tuple[int, int], rest: bytes = b"") -> bytes:
    return b"".join(struct.pack("<II", *entry) for entry in entries) + rest


BAD_PAYLOADS = {
    "half an entry": body((1, 1))[:5],
    "no body": body((1, 1)),
    "a value is missing": body((2, 2), rest=b"\0\0\1"),
    "a byte too many": body((1, 1), rest=b"\0\1\0"),
    "more elements than there are": body((HALF + 1, HALF + 1), rest=b"\0" * (2 * HALF + 2)),
    "a position outside": body((1, 1), rest=bytes([HALF, 9])),
    "the second position outside": body((2, 2), rest=bytes([90, 9, 1, 1])),
    "a gap cut off": body((1, 1), rest=bytes([230, 9])),
    "a long gap cut off": body((1, 2), rest=bytes([255, 0, 9])),
    "a short gap in the long form": body((1, 4), rest=bytes([255, 5, 0, 0, 9])),
    "bytes of gaps left over": body((1, 2), rest=bytes([5, 5, 9])),
    "too few gaps": body((2, 1), rest=bytes([5, 9, 9])),
    "dense with gaps": body((0xFFFFFFFF, 1), rest=b"\0" * (HALF + 1)),
    "dense and short": body((0xFFFFFFFF, 0), rest=b"\0" * (HALF - 1)),
    "dense and long": body((0xFFFFFFFF, 0), rest=b"\0" * (HALF + 1)),
    "lengths that overflow": body((0x7FFFFFFF, 0xFFFFFFFF), rest=b"\0" * 50),
    "gaps that reach beyond": body((0, 90), rest=b"\0" * 50),
}
WELL_FORMED = {
    "another value": body((1, 1), rest=bytes([5, 2])),
    "another position": body((1, 1), rest=bytes([6, 1])),
    "nothing changed": body((0, 0)),
}


@pytest.mark.parametrize("payload", [*BAD_PAYLOADS.values(), *WELL_FORMED.values()], ids=[*BAD_PAYLOADS, *WELL_FORMED])
def test_a_delta_that_the_sender_did_not_make_is_refused_before_anything_is_written(payload: bytes) -> None:
    ranks = one_block(HALF)
    ranks.sources[0]["s"][5] = 1
    ranks.encode(2)
    refused(ranks, {0: [np.frombuffer(payload, np.uint8).copy()]}, "must be full|expected at most")


def gap_bytes(gap: int) -> bytes:
    """The code of a gap, by the definition in csrc/delta_format.h."""
    if gap < 224:
        return bytes([gap])
    if gap < 224 + 256 * 31:
        return bytes([224 + (gap - 224) // 256, (gap - 224) % 256])
    return bytes([255, *gap.to_bytes(3, "little")])


@given(st.sets(st.integers(0, 131071), min_size=1, max_size=300), st.integers(0, 40))
@settings(max_examples=examples(100), deadline=None)
def test_payloads_are_those_of_the_definition(positions: set[int], shift: int) -> None:
    """Including gaps at both ends of each length of the code."""
    chosen = sorted({*positions, *(p for p in (0, 224 + shift, 449 + shift, 8609 + 2 * shift, 16769 + 3 * shift, 131071) if shift % 2)})
    ranks = one_block(131072)
    ranks.sources[0]["s"][chosen] = 7
    ranks.encode(2)
    gaps = b"".join(gap_bytes(b - a - 1) for a, b in zip([-1, *chosen[:-1]], chosen, strict=True))
    assert ranks.messages(1)[0][0].tobytes() == struct.pack("<II", len(chosen), len(gaps)) + gaps + bytes([7] * len(chosen))
    ranks.receive(1, ranks.messages(1))
    ranks.receivers[1].commit(2)
    np.testing.assert_array_equal(np.flatnonzero(ranks.destinations[1]["s"]), chosen)


def test_a_plan_in_which_a_rank_copies_from_itself_is_refused() -> None:
    made = plan({"w": (4,)}, [matrix(0, (4,))], [matrix(0, (4,))])
    with pytest.raises(LayoutError, match="rank 0 copies from itself"):
        Ranks(made, {0: {"s": np.zeros(4, np.uint16)}}, {})
