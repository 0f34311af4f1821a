"""The compiled half: strided copies and digests, against NumPy and plain Python."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncmoe.reshard._C as _C
from asyncmoe.reshard import digest
from asyncmoe.reshard.layout import contiguous_strides
from tests.unit.example_counts import examples

GUARD = 64
"""Bytes on both sides of a destination that must stay as they were."""

Copy = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def address(array: np.ndarray) -> np.ndarray:
    return np.array([array.ctypes.data], np.int64)


def on_cpu(rows: np.ndarray, source: np.ndarray, destination: np.ndarray, threads: int = 1) -> None:
    _C.copy(rows, address(source), address(destination), threads)


def check_box(
    copy: Copy, item: int, extent: tuple[int, ...], gaps: tuple[int, ...], order: tuple[int, ...], offset: int, fill: bool
) -> None:
    """Copy a box out of a larger array into one with permuted dimensions."""
    larger = tuple(n + g for n, g in zip(extent, gaps, strict=True))
    source = np.random.default_rng(0).integers(1, 256, (offset + int(np.prod(larger))) * item, np.uint8)
    source_strides = [s * item for s in contiguous_strides(larger)]
    steps = contiguous_strides(tuple(extent[k] for k in order))
    strides = [steps[order.index(k)] * item for k in range(4)]
    nbytes = int(np.prod(extent)) * item
    destination = np.full(GUARD + nbytes + GUARD, 0xAA, np.uint8)
    row = [-1 if fill else 0, offset * item, 0, GUARD, item, *extent, *source_strides, *strides]
    copy(np.array([row], np.int64), source, destination)
    box = np.lib.stride_tricks.as_strided(source[offset * item :], (*extent, item), (*source_strides, 1))
    expected = np.zeros_like(box) if fill else box
    got = destination[GUARD:-GUARD].reshape(*(extent[k] for k in order), item)
    np.testing.assert_array_equal(got, expected.transpose(*order, 4))
    assert (destination[:GUARD] == 0xAA).all()
    assert (destination[-GUARD:] == 0xAA).all()


@given(
    item=st.sampled_from([1, 2, 4, 8]),
    extent=st.tuples(*[st.integers(1, 7)] * 4),
    gaps=st.tuples(*[st.integers(0, 2)] * 4),
    order=st.permutations(range(4)).map(tuple),
    offset=st.integers(0, 3),
    fill=st.booleans(),
)
@settings(max_examples=examples(300), deadline=None)
def test_boxes(item: int, extent: tuple[int, ...], gaps: tuple[int, ...], order: tuple[int, ...], offset: int, fill: bool) -> None:
    check_box(on_cpu, item, extent, gaps, order, offset, fill)


@pytest.mark.parametrize(("threads", "gap"), [(1, 0), (3, 5)])
@pytest.mark.parametrize("extent", [(1, 1, 1, 5 << 20), (1, 3, 2, 1 << 20), (1, 1 << 11, 1, 3 << 10), (3, 700, 1, 1 << 11)])
def test_large_boxes_are_cut_for_threads(extent: tuple[int, ...], gap: int, threads: int) -> None:
    check_box(lambda *a: on_cpu(*a, threads=threads), 1, extent, (0, 0, 0, gap), (0, 1, 2, 3), 1, False)


@pytest.mark.parametrize(
    ("column", "value"), [(0, 1), (2, 1), (2, -1), (1, -4), (3, -4), (4, 0), (5, -1), (9, -8), (13, -8)], ids=lambda v: str(v)
)
def test_malformed_descriptors_are_refused(column: int, value: int) -> None:
    source, destination = np.ones(8, np.int32), np.zeros(8, np.int32)
    row = np.array([[0, 0, 0, 0, 4, 1, 1, 1, 8, 0, 0, 0, 4, 0, 0, 0, 4]], np.int64)
    row[0, column] = value
    with pytest.raises(ValueError, match="descriptor 0"):
        on_cpu(row, source, destination)
    assert not destination.any()


# ---------------------------------------------------------------- digest

MASK = (1 << 64) - 1


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def digest_in_python(data: bytes) -> int:
    total = len(data)
    for i in range(0, len(data), 8):
        total += mix(int.from_bytes(data[i : i + 8], "little") + (i // 8 + 1) * 0x9E3779B97F4A7C15 & MASK)
    return mix(total & MASK)


@given(st.binary(max_size=200))
def test_digest_is_the_documented_one(data: bytes) -> None:
    assert digest(data) == digest_in_python(data)


def test_digest_does_not_depend_on_threads_or_alignment() -> None:
    data = np.random.default_rng(0).integers(0, 256, (5 << 20) + 3, np.uint8)
    shifted = np.concatenate([[np.uint8(0)], data])[1:]
    assert len({digest(data, threads=1), digest(data, threads=3), digest(data.copy(), threads=2), digest(shifted)}) == 1
