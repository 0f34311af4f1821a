"""What the copy kernel does, run on the CPU by the functions the kernel is made of, against `Program.run`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reshard_program import Extent, address, casts, message_rows, swapped

import asyncmoe.reshard._C as _C
from asyncmoe.reshard import digest
from asyncmoe.reshard.layout import contiguous_strides
from tests.unit.example_counts import examples

TILE = 16384
"""Bytes of a tile (csrc/copy_unit.h)."""
POISON = 0xAA


def aligned(nbytes: int, shift: int) -> np.ndarray:
    """Poisoned bytes that begin `shift` behind a multiple of 16, as an allocation of a GPU or a view into one may."""
    whole = np.full(nbytes + 32, POISON, np.uint8)
    start = -whole.ctypes.data % 16 + shift
    return whole[start : start + nbytes]


def random(nbytes: int, shift: int = 0) -> np.ndarray:
    array = aligned(nbytes, shift)
    array[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    return array


def both(program: _C.Program, source: np.ndarray, target: tuple[int, int], blocks: int, chunk: int = 0) -> np.ndarray:
    """Run a chunk both ways into poisoned arrays of (bytes, misalignment); they and the digests must agree."""
    got, expected = aligned(*target), aligned(*target)
    wanted = program.run(chunk, address(source), address(expected), 1)
    assert _C.emulate_cuda(program, chunk, address(source), address(got), blocks) == wanted
    np.testing.assert_array_equal(got, expected)
    return got


boxes_of = st.lists(st.tuples(st.integers(0, 2), st.tuples(*[st.integers(1, 6)] * 4)), min_size=1, max_size=12)


@given(boxes=boxes_of, item=st.sampled_from([1, 2, 3, 4, 8, 16]), shifts=st.tuples(*[st.integers(0, 15)] * 3), blocks=st.integers(1, 3))
@settings(max_examples=examples(400), deadline=None)
def test_messages_of_odd_boxes(boxes: list[tuple[int, Extent]], item: int, shifts: tuple[int, int, int], blocks: int) -> None:
    rows, held = message_rows(boxes, item)
    firsts = np.array([0, len(rows)], np.int64)
    packing, unpacking = _C.Program(rows, firsts, "destination"), _C.Program(swapped(rows), firsts, "source")
    source = random(held, shifts[0])
    message = both(packing, source, (packing.bytes(0), shifts[1]), blocks)
    assert _C.emulate_cuda(packing, 0, address(source), address(message), blocks) == digest(message)
    both(unpacking, message, (held, shifts[2]), blocks)


@given(
    item=st.sampled_from([1, 2, 4, 8, 16]),
    extent=st.tuples(*[st.integers(1, 7)] * 4),
    gaps=st.tuples(*[st.integers(0, 2)] * 4),
    order=st.permutations(range(4)),
    shifts=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    fill=st.integers(-1, 0),
)
@settings(max_examples=examples(400), deadline=None)
def test_copies_without_a_message(item: int, extent: Extent, gaps: Extent, order: list[int], shifts: tuple[int, int], fill: int) -> None:
    """Permuted, strided on both sides, and zeros; two boxes next to each other in the destination."""
    larger = tuple(n + g for n, g in zip(extent, gaps, strict=True))
    steps = contiguous_strides(tuple(extent[k] for k in order))
    nbytes = int(np.prod(extent)) * item
    strides = [item * s for s in contiguous_strides(larger)], [item * steps[order.index(k)] for k in range(4)]
    rows = [[number, 0, 0, at, item, *extent, *strides[0], *strides[1]] for number, at in ((fill, 1), (0, 1 + nbytes))]
    program = _C.Program(np.array(rows, np.int64), np.array([0, 2], np.int64), "none")
    got = both(program, random(int(np.prod(larger)) * item, shifts[0]), (2 * nbytes + 2, shifts[1]), 2)
    assert got[0] == got[-1] == POISON
    assert fill == 0 or not got[1 : 1 + nbytes].any()


@given(
    boxes=st.lists(st.tuples(st.integers(0, 2), st.tuples(*[st.integers(1, 5)] * 4)), min_size=1, max_size=6),
    shifts=st.tuples(st.integers(0, 15), st.integers(0, 15)),
)
@settings(max_examples=examples(300), deadline=None)
def test_casts(boxes: list[tuple[int, Extent]], shifts: tuple[int, int]) -> None:
    rows, held = message_rows(boxes, 4)
    rows[:, 3] //= 2
    rows[:, 13:] //= 2
    program = _C.Program(rows, np.array([0, len(rows)], np.int64), "destination", casts(*[1] * len(rows)))
    both(program, random(held, shifts[0]), (program.bytes(0), shifts[1]), 1)


def test_casts_behind_some_bytes() -> None:
    elements = 64
    for odd, shift in itertools.product(range(1, 33), range(0, 16, 4)):
        begin = 32 + odd % 4 * 4
        raw = [0, 0, 0, 0, 1, 1, 1, 1, odd, 0, 0, 0, 1, 0, 0, 0, 1]
        cast = [0, begin, 0, odd, 4, 1, 1, 1, elements, 0, 0, 0, 4, 0, 0, 0, 2]
        program = _C.Program(np.array([raw, cast], np.int64), np.array([0, 2], np.int64), "destination", casts(0, 1))
        both(program, random(begin + 4 * elements, shift), (odd + 2 * elements, 0), 1)


@pytest.mark.parametrize("blocks", [1, 7])
@pytest.mark.parametrize(
    ("extent", "gap"),
    [
        ((1, 1, 1, TILE), 0), ((1, 1, 1, 3 * TILE + 1), 0), ((1, 1, 2, TILE - 8), 16), ((5, 3, 33, 127), 1),
        ((1, 1, 300, 768), 768), ((2, 7, 64, 128), 16), ((1, 1, TILE, 1), 1), ((3, 5, 400, 8), 8),
    ],
)  # fmt: skip
def test_boxes_of_several_tiles(extent: Extent, gap: int, blocks: int) -> None:
    larger = (*extent[:3], extent[3] + gap)
    strides = [*contiguous_strides(larger), *contiguous_strides(extent)]
    rows = np.array([[0, 0, 0, 0, 1, *extent, *strides]], np.int64)
    rows = np.concatenate([rows, rows])
    rows[1, 3] = int(np.prod(extent))
    firsts = np.array([0, 2], np.int64)
    program = _C.Program(rows, firsts, "destination")
    message = both(program, random(int(np.prod(larger))), (program.bytes(0), 0), blocks)
    spread = swapped(rows[:1])
    both(_C.Program(spread, firsts // 2, "source"), message, (int(np.prod(larger)), 0), blocks)


big = st.integers(1, 1 << 14)


@given(
    extent=st.tuples(big, big, st.integers(1, 1 << 10), st.integers(1, 1 << 12)),
    gap=st.integers(1, 3),
    item=st.sampled_from([1, 2, 8]),
    where=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=examples(400), deadline=None)
def test_addresses_in_boxes_of_any_size(extent: Extent, gap: int, item: int, where: float) -> None:
    """Far more than 4 GiB, and just below and above the 2^31 bytes up to which positions are divided without dividing."""
    larger = tuple(n + gap for n in extent)
    source, row_major = ([item * s for s in contiguous_strides(shape)] for shape in (larger, extent))
    row = np.array([[0, 24, 0, 0, item, *extent, *source, *row_major]], np.int64)
    program = _C.Program(row, np.array([0, 1], np.int64), "destination")
    nbytes = item * int(np.prod(extent, dtype=object))
    for position in {int(nbytes * where), nbytes - 1, min(nbytes - 1, (1 << 31) - 1), min(nbytes - 1, (1 << 32) + 5)}:
        element, byte = divmod(position, item)
        index = []
        for n in reversed(extent):
            element, i = divmod(element, n)
            index.insert(0, i)
        read, _, left = _C.locate_on_cuda(program, 0, position)
        assert read == 24 + byte + sum(i * s for i, s in zip(index, source, strict=True))
        assert 1 <= left <= nbytes - position


# ---------------------------------------------------------------- even tiles (csrc/copy_even.h)

LEAST = 8192
"""Bytes of the smallest even part of a box (csrc/copy_table.cpp)."""


def ways(program: _C.Program, source: np.ndarray, target: np.ndarray) -> dict[str, int]:
    """Bytes by way."""
    found: dict[str, int] = {}
    for (way, _), (_, nbytes) in _C.ways_on_cuda(program, 0, address(source), address(target)).items():
        found[way] = found.get(way, 0) + nbytes
    return found


def one_chunk(rows: np.ndarray, message: str, kinds: np.ndarray | None = None) -> _C.Program:
    return _C.Program(rows, np.array([0, len(rows)], np.int64), message, *([] if kinds is None else [kinds]))


def rows_of(boxes: list[tuple[int, int, int]]) -> tuple[np.ndarray, int]:
    """Rows that pack boxes of (bytes between runs, runs, bytes of a run), and the bytes they are packed from."""
    rows, at, offset = [], 0, 0
    for gap, height, run in boxes:
        rows.append([0, offset, 0, at, 1, 1, 1, height, run, 0, 0, run + gap, 1, 0, 0, run, 1])
        at, offset = at + height * run, offset + height * (run + gap)
    return np.array(rows, np.int64), offset


even_boxes = st.lists(
    st.one_of(
        st.tuples(st.just(0), st.just(1), st.one_of(st.integers(1, 3000), st.integers(LEAST - 20, 4 * TILE))),
        st.tuples(st.just(0), st.just(1), st.integers(1, 4).map(lambda n: n * TILE)),
        st.tuples(st.sampled_from([16, 32, 5]), st.integers(2, 300), st.integers(1, 20).map(lambda n: 16 * n)),
        st.tuples(st.integers(0, 9), st.integers(1, 30), st.integers(1, 90)),
    ),
    min_size=1,
    max_size=4,
)


@given(boxes=even_boxes, shift=st.sampled_from([0, 0, 0, 8, 2]), blocks=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_messages_of_boxes_of_both_kinds(boxes: list[tuple[int, int, int]], shift: int, blocks: int) -> None:
    """Tiles end wherever boxes and runs do, so that units straddle boxes, and bases are aligned or not."""
    rows, held = rows_of(boxes)
    packing, unpacking = one_chunk(rows, "destination"), one_chunk(swapped(rows), "source")
    source = random(held, shift)
    message = both(packing, source, (packing.bytes(0), 0), blocks)
    both(unpacking, message, (held, shift), blocks)
    assert sum(ways(packing, source, message).values()) == packing.bytes(0)
    back = aligned(held, shift)
    assert sum(ways(unpacking, message, back).values()) == packing.bytes(0)


@pytest.mark.parametrize("cast", [2, 3])
@pytest.mark.parametrize(
    ("shape", "begin", "columns"), [((300, 1024), 0, 1024), ((300, 1024), 256, 512), ((200, 400), 16, 80), ((64, 8192), 128, 4096)]
)
@pytest.mark.parametrize("message", ["none", "destination"])
def test_quantised_weights_go_evenly(cast: int, shape: tuple[int, int], begin: int, columns: int, message: str) -> None:
    """Rows of a matrix and parts of rows, with a scale of its own for every block, as it is without even tiles."""
    (height, width), item = shape, 4 if cast == 2 else 2
    generator = np.random.default_rng(0)
    values = generator.standard_normal(height * width).astype(np.float32) * 100
    source = aligned(height * width * item, 0)
    source[:] = (values if item == 4 else (values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    across = -(-width // 128)
    scales = (2.0 ** generator.integers(-3, 4, -(-height // 128) * across)).astype(np.float32)
    row = [0, begin * item, 0, 0, item, 1, 1, height, columns, 0, 0, width * item, item, 0, 0, columns, 1]
    program = one_chunk(np.array([row], np.int64), message, casts(cast, scales=1, width=width))
    bases = np.array([source.ctypes.data, scales.ctypes.data], np.int64)
    got, expected, uneven = (aligned(height * columns, shift) for shift in (0, 0, 8))
    program.run(0, bases, address(expected), 1)
    for target in (got, uneven):
        _C.emulate_cuda(program, 0, bases, address(target), 2)
        np.testing.assert_array_equal(target, expected)
    assert {way for way, _ in _C.ways_on_cuda(program, 0, bases, address(got))} <= {"run", "rows"}
    assert set(_C.ways_on_cuda(program, 0, bases, address(uneven))) == {("uneven", 0)}
