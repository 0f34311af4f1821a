"""What the copy kernel does, run on the CPU by the functions the kernel is made of, against `Program.run`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reshard_program import Extent, address, casts, message_rows, rounded, swapped

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


@pytest.mark.parametrize("odd", range(1, 33))
def test_casts_behind_some_bytes(odd: int) -> None:
    elements, begin = 64, 32 + odd % 4 * 4
    raw = [0, 0, 0, 0, 1, 1, 1, 1, odd, 0, 0, 0, 1, 0, 0, 0, 1]
    cast = [0, begin, 0, odd, 4, 1, 1, 1, elements, 0, 0, 0, 4, 0, 0, 0, 2]
    program = _C.Program(np.array([raw, cast], np.int64), np.array([0, 2], np.int64), "destination", casts(0, 1))
    for shift in range(0, 16, 4):
        both(program, random(begin + 4 * elements, shift), (odd + 2 * elements, 0), 1)


def test_every_kind_of_number_is_rounded_as_torch_does() -> None:
    generator = np.random.default_rng(0)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    ties = [upper | low for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    values = np.concatenate([generator.integers(0, 1 << 32, 1 << 16, np.uint32), *ties]).view(np.float32)
    row = np.array([[0, 0, 0, 0, 4, 1, 1, 1, len(values), 0, 0, 0, 4, 0, 0, 0, 2]], np.int64)
    program = _C.Program(row, np.array([0, 1], np.int64), "destination", casts(1))
    source = aligned(values.nbytes, 0)
    source[:] = values.view(np.uint8)
    got = both(program, source, (values.nbytes // 2, 0), 2).view(np.uint16)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(got[number], rounded(values)[number])
    assert ((got[~number] & 0x7F80) == 0x7F80).all()
    assert ((got[~number] & 0x7F) != 0).all()


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


def test_many_small_boxes_and_chunks() -> None:
    generator = np.random.default_rng(1)
    sizes = generator.integers(1, 40, 5000)
    ends = np.cumsum(sizes)
    rows = np.zeros((len(sizes), _C.COLUMNS), np.int64)
    rows[:, 1], rows[:, 3] = 3 * (ends - sizes), ends - sizes
    rows[:, 4:8], rows[:, 8], rows[:, 12], rows[:, 16] = 1, sizes, 3, 1
    edges = [0, 1, 1, 1700, 4999, 5000]
    for first, last in itertools.pairwise(edges):
        if last > first:
            rows[first:last, 3] -= rows[first, 3]
    program = _C.Program(rows, np.array(edges, np.int64), "destination")
    source = random(3 * int(ends[-1]))
    for chunk in range(program.chunks):
        both(program, source, (program.bytes(chunk), 0), 2, chunk)


def test_zeros_of_padding_are_packed() -> None:
    rows, held = message_rows([(1, (1, 2, 3, 5)), (0, (1, 1, 1, 37)), (2, (2, 2, 2, 2))], 2)
    rows[1, 0] = -1
    program = _C.Program(rows, np.array([0, 3], np.int64), "destination")
    got = both(program, random(held), (program.bytes(0), 0), 1)
    assert not got[60 : 60 + 74].any()


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


@given(divisor=st.integers(1, (1 << 31) - 1), n=st.integers(0, (1 << 31) - 1))
@settings(max_examples=examples(1000), deadline=None)
def test_division_by_multiplication(divisor: int, n: int) -> None:
    """Through a box of `divisor` rows of a byte that lie apart, and as many planes as 2^31 bytes leave room for."""
    planes = ((1 << 31) - 1) // divisor
    row = np.array([[0, 0, 0, 0, 1, 1, planes, divisor, 1, 0, 3 * divisor, 2, 1, 0, divisor, 1, 1]], np.int64)
    program = _C.Program(row, np.array([0, 1], np.int64), "destination")
    for position in (n, planes * divisor - 1, n // divisor * divisor, max(0, n // divisor * divisor - 1)):
        position %= planes * divisor
        above, i = divmod(position, divisor)
        assert _C.locate_on_cuda(program, 0, position)[0] == 3 * divisor * above + 2 * i


def test_a_changed_message_has_another_digest() -> None:
    rows, held = message_rows([(1, (1, 2, 3, 5)), (0, (1, 1, 1, 37))], 1)
    program = _C.Program(swapped(rows), np.array([0, 2], np.int64), "source")
    message, back = random(program.bytes(0)), aligned(held, 0)
    digests = {_C.emulate_cuda(program, 0, address(message), address(back))}
    for i in range(len(message)):
        message[i] ^= 1
        digests.add(_C.emulate_cuda(program, 0, address(message), address(back)))
        message[i] ^= 1
    assert len(digests) == 1 + len(message)


def test_what_is_not_there_is_refused() -> None:
    rows, _ = message_rows([(0, (1, 1, 1, 4))], 1)
    program = _C.Program(rows, np.array([0, 1], np.int64), "destination")
    with pytest.raises(ValueError, match="chunk: got 1, expected below 1"):
        _C.emulate_cuda(program, 1, address(rows), address(rows))
    with pytest.raises(ValueError, match="base addresses: got 0 sources and 1 destinations"):
        _C.emulate_cuda(program, 0, np.empty(0, np.int64), address(rows))
