"""Prepared copies and their digests, casts, and how transfers are cut into messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_ranks import single
from test_reshard_copy import address

import asyncmoe.reshard._C as _C
from asyncmoe.reshard import RankLayout, digest, plan
from asyncmoe.reshard.chunks import TRAILER_BYTES, cut_boxes, cut_transfer, cuts_of
from asyncmoe.reshard.layout import columns, contiguous_strides
from asyncmoe.reshard.layout import rows as part_of_rows
from tests.unit.example_counts import examples

Extent = tuple[int, int, int, int]


def message_rows(boxes: list[tuple[int, Extent]], item: int) -> tuple[np.ndarray, int]:
    """Rows that pack boxes out of the corners of larger arrays, one after the other; and the bytes of the larger arrays together."""
    rows, at, offset = [], 0, 0
    for gap, extent in boxes:
        larger = tuple(n + gap for n in extent)
        steps = [item * s for s in contiguous_strides(larger)]
        rows.append([0, offset, 0, at, item, *extent, *steps, *(item * s for s in contiguous_strides(extent))])
        at += item * int(np.prod(extent))
        offset += item * int(np.prod(larger))
    return np.array(rows, np.int64), offset


def casts(*kinds: int, scales: int = 0, width: int = 0) -> np.ndarray:
    """Casts of rows (csrc/cast.h): 0 is none, 1 rounds float32 to bfloat16, 2 and 3 quantise float32 and bfloat16."""
    return np.array([[kind, scales, width] for kind in kinds], np.int64)


def swapped(rows: np.ndarray) -> np.ndarray:
    return rows[:, [2, 3, 0, 1, 4, 5, 6, 7, 8, 13, 14, 15, 16, 9, 10, 11, 12]].copy()


@given(
    boxes=st.lists(st.tuples(st.integers(0, 2), st.tuples(*[st.integers(1, 5)] * 4)), min_size=1, max_size=6),
    item=st.sampled_from([1, 2, 4]),
    threads=st.integers(1, 3),
)
@settings(max_examples=examples(150), deadline=None)
def test_packing_and_unpacking_give_the_digest_of_the_message(boxes: list[tuple[int, Extent]], item: int, threads: int) -> None:
    rows, held = message_rows(boxes, item)
    source = np.random.default_rng(0).integers(0, 256, held, np.uint8)
    firsts = np.array([0, len(rows)], np.int64)
    packing = _C.Program(rows, firsts, "destination")
    message = np.empty(packing.bytes(0), np.uint8)
    expected = message.copy()
    _C.copy(rows, address(source), address(expected), 1)
    assert packing.run(0, address(source), address(message), threads) == digest(message)
    np.testing.assert_array_equal(message, expected)
    back, wanted = np.zeros_like(source), np.zeros_like(source)
    _C.copy(swapped(rows), address(message), address(wanted), 1)
    unpacking = _C.Program(swapped(rows), firsts, "source")
    assert unpacking.run(0, address(message), address(back), threads) == digest(message)
    np.testing.assert_array_equal(back, wanted)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "extent", [(1, 1, 1, 5_000_003), (1, 1, 3001, 1001), (3, 2, 1 << 20, 1), (2, 3000, 7, 33), (1, 1, 3000, 768), (1, 5, 400, 1096)]
)
def test_large_boxes_digest_as_one_message(extent: Extent, threads: int) -> None:
    rows, held = message_rows([(1, extent), (0, (1, 1, 1, 5))], 1)
    source = np.random.default_rng(0).integers(0, 256, held, np.uint8)
    program = _C.Program(rows, np.array([0, 2], np.int64), "destination")
    message = np.empty(program.bytes(0), np.uint8)
    assert program.run(0, address(source), address(message), threads) == digest(message, threads=1)
    expected = message.copy()
    _C.copy(rows, address(source), address(expected), 1)
    np.testing.assert_array_equal(message, expected)


@pytest.mark.parametrize("offset", [0, 1, 8, 56, 64])
@pytest.mark.parametrize("nbytes", [64, 1024, 1032, 16384, 16384 * 3 + 8 * 77])
def test_contiguous_copies_of_every_alignment(nbytes: int, offset: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, nbytes + 64, np.uint8)
    message = np.full(nbytes + 256, 0xAA, np.uint8)
    program = _C.Program(message_rows([(0, (1, 1, 1, nbytes))], 1)[0], np.array([0, 1], np.int64), "destination")
    base = address(message) + 64 + offset
    assert program.run(0, address(source) + 8, base, 1) == digest(source[8 : 8 + nbytes].copy())
    np.testing.assert_array_equal(message[64 + offset : 64 + offset + nbytes], source[8 : 8 + nbytes])
    assert (message[: 64 + offset] == 0xAA).all()
    assert (message[64 + offset + nbytes :] == 0xAA).all()


def rounded(values: np.ndarray) -> np.ndarray:
    """bfloat16 bits by torch."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("how", ["cpu", "gpu emulated"])
def test_cast_rounds_as_torch_does(how: str) -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 32, 1 << 16, np.uint32)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    ties = np.concatenate([upper | low for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = np.concatenate([bits, ties]).view(np.float32)
    got = np.empty(len(values), np.uint16)
    row = np.array([[0, 0, 0, 0, 4, 1, 1, 1, len(values), 0, 0, 0, 4, 0, 0, 0, 2]], np.int64)
    if how == "cpu":
        _C.copy(row, address(values), address(got), 2, casts(1))
    else:
        _C.emulate_cuda(_C.Program(row, np.array([0, 1], np.int64), "none", casts(1)), 0, address(values), address(got), 2)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(got[number], rounded(values)[number])
    assert ((got[~number] & 0x7F80) == 0x7F80).all()
    assert ((got[~number] & 0x7F) != 0).all()


# ---------------------------------------------------------------- messages


def rows_to_columns(sources: int, destinations: int, shape: tuple[int, int]) -> tuple[list[RankLayout], list[RankLayout]]:
    high, wide = shape[0] // sources, shape[1] // destinations
    held = [single(r, "s", "w", part_of_rows(shape, r * high, high)) for r in range(sources)]
    return held, [single(sources + r, "d", "w", columns(shape, r * wide, wide)) for r in range(destinations)]


@pytest.mark.parametrize("limit", [4, 12, 100, 4096])
def test_cut_boxes_are_small_and_cover_what_was_cut(limit: int) -> None:
    held, wanted = rows_to_columns(1, 1, (30, 20))
    copies = plan({"w": (30, 20)}, held, wanted).transfers[0].copies
    cut = cut_boxes(copies, limit)
    sizes = cut[:, 6:10].prod(1) * 4
    assert sizes.max() <= limit
    assert sizes.sum() == 2400
    written = [at + 80 * i + 4 * j for at, (h, w) in zip(cut[:, 3], cut[:, 8:10], strict=True) for i in range(h) for j in range(w)]
    assert sorted(written) == list(range(0, 2400, 4))
    np.testing.assert_array_equal(cut[:, 1], cut[:, 3])


@pytest.mark.parametrize(("sources", "destinations"), [(1, 1), (4, 2), (3, 7)])
def test_one_message_of_every_pair_fits_into_a_bucket(sources: int, destinations: int) -> None:
    shapes = {"w": (sources * 24, destinations * 40)}
    made = plan(shapes, *rows_to_columns(sources, destinations, shapes["w"]))
    for bucket in (*range(1 << 10, 6000, 100), 1 << 20):
        cuts = cuts_of(made, bucket)
        held = dict.fromkeys(range(sources + destinations), 0)
        for transfer in made.transfers:
            cut = cuts[transfer.source, transfer.destination]
            chunks = cut_transfer(made, transfer, *cut)
            assert sum(chunks.nbytes) == transfer.nbytes
            assert max(chunks.slot_bytes, cut_transfer(made, transfer, cut.limit).slot_bytes) <= cut.limit
            assert len(chunks) == cut.messages or cut.limit < 16 * 4 + TRAILER_BYTES  # an element is more than 1/16 of a message
            if len(chunks) == cut.messages:
                assert max(chunks.nbytes) - min(chunks.nbytes) <= max(8, transfer.nbytes // cut.messages // 8)
            for rank in (transfer.source, transfer.destination):
                held[rank] += chunks.slot_bytes
        assert max(held.values()) <= bucket
