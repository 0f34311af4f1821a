"""Exact tests that pieces hold every element of a storage exactly once, and the location of the first fault.

Boxes are compared on the grid of their own edges, so the cost depends on the number of boxes and not on the number of elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.layout import Box, Storage, contiguous_strides
from asyncmoe.reshard.table import EXTENT, OFFSET, STORAGE, STRIDES, TENSOR, Table, Tensors


class Grid:
    """The cells into which the edges of `boxes` cut a box of `shape`, and the number of boxes that contain each cell."""

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        self._cuts = [sorted({0, n, *(b.start[k] for b in boxes), *(b.start[k] + b.extent[k] for b in boxes)}) for k, n in enumerate(shape)]
        self._index = [{cut: i for i, cut in enumerate(cuts)} for cuts in self._cuts]
        self.counts = np.zeros([len(cuts) - 1 for cuts in self._cuts], np.int32)
        for box in boxes:
            self.counts[self._range(box)] += 1

    def cells(self, wanted: np.ndarray) -> list[Box]:
        """Return the cells for which `wanted` (bool, shaped as `counts`) is true, in row-major order."""
        found = []
        for at in np.argwhere(wanted):
            start = tuple(cuts[i] for cuts, i in zip(self._cuts, at, strict=True))
            end = tuple(cuts[i + 1] for cuts, i in zip(self._cuts, at, strict=True))
            found.append(Box(start, tuple(e - s for s, e in zip(start, end, strict=True))))
        return found

    def _range(self, box: Box) -> tuple[slice, ...]:
        edges = zip(self._index, box.start, box.extent, strict=True)
        return tuple(slice(index[s], index[s + n]) for index, s, n in edges)


def check_source(tensors: Tensors, table: Table) -> None:
    """Reject a layout that puts two tensor elements in the same place.

    Raises:
        LayoutError: names the rank, the storage, its first box that more than one piece holds, and the tensors of these pieces.
    """
    _check(tensors, table, covered=False)


def check_destination(tensors: Tensors, table: Table) -> None:
    """Reject a layout whose pieces do not hold each element of each storage exactly once.

    Raises:
        LayoutError: names the rank, the storage, its first box held by no piece or by more than one, and the tensors of these pieces.
    """
    _check(tensors, table, covered=True)


def _check(tensors: Tensors, table: Table, *, covered: bool) -> None:
    for number in _C.doubtful_storages(table.pieces, table.shapes, covered):
        rows = np.flatnonzero(table.pieces[:, STORAGE] == number)
        storage, pieces = table.storages[number], table.pieces[rows]
        boxes = [_box_in(storage, piece) for piece in pieces]
        known = [box for box in boxes if box is not None]
        least = 1 if covered else 0
        fault = _first_fault(storage.shape, known, least) if len(known) == len(boxes) else _first_fault_by_element(storage, pieces, least)
        if fault is not None:
            box, count = fault
            held = [tensors.names[p[TENSOR]] for p, b in zip(pieces, boxes, strict=True) if b is not None and _meet(b, box)]
            raise LayoutError(
                f"rank {table.rank}: storage {table.names[number]} box {box}",
                got=f"{count} pieces" + (f" ({', '.join(held)})" if held else ""),
                expected="exactly 1 (a PADDING piece where no tensor lies)" if covered else "1 at most",
            )


def _first_fault(shape: Sequence[int], boxes: Sequence[Box], least: int) -> tuple[Box, int] | None:
    grid = Grid(shape, boxes)
    wrong = grid.cells((grid.counts < least) | (grid.counts > 1))
    if not wrong:
        return None
    first = wrong[0]
    return first, sum(_meet(first, box) for box in boxes)


def _meet(a: Box, b: Box) -> bool:
    edges = zip(a.start, a.extent, b.start, b.extent, strict=True)
    return all(s < t + m and t < s + n for s, n, t, m in edges)


def _box_in(storage: Storage, piece: np.ndarray) -> Box | None:
    """Return the piece as a box of the storage's shape, or None if it is not a box (a run that wraps around the end of a row)."""
    extent, strides = piece[EXTENT].tolist(), piece[STRIDES].tolist()
    runs = [(n, s) for n, s in zip(extent, strides, strict=True) if n > 1]
    box = _box_of_runs(storage, int(piece[OFFSET]), runs)
    whole = [s for n, s in zip(extent, contiguous_strides(extent), strict=True) if n > 1]
    if box is None and whole == [s for _, s in runs]:
        box = _box_of_runs(storage, int(piece[OFFSET]), [(int(piece[EXTENT].prod()), 1)])
    return box


def _box_of_runs(storage: Storage, offset: int, runs: Sequence[tuple[int, int]]) -> Box | None:
    steps = contiguous_strides(storage.shape)
    start = tuple(offset // step % n for step, n in zip(steps, storage.shape, strict=True))
    extent = [1] * len(steps)
    for n, stride in runs:
        axis = next((k for k, step in enumerate(steps) if step == stride and storage.shape[k] > 1), None)
        if axis is None or extent[axis] != 1 or start[axis] + n > storage.shape[axis]:
            return None
        extent[axis] = n
    return Box(start, tuple(extent))


def _first_fault_by_element(storage: Storage, pieces: np.ndarray, least: int) -> tuple[Box, int] | None:
    counts = np.zeros(storage.size, np.int64)
    for piece in pieces:
        places = np.full((1,) * len(piece[EXTENT]), piece[OFFSET])
        for axis, (n, stride) in enumerate(zip(piece[EXTENT], piece[STRIDES], strict=True)):
            places = places + np.expand_dims(np.arange(n) * stride, tuple(k for k in range(len(piece[EXTENT])) if k != axis))
        counts += np.bincount(places.reshape(-1), minlength=storage.size)
    wrong = np.flatnonzero((counts < least) | (counts > 1))
    if not len(wrong):
        return None
    first = int(wrong[0])
    start = tuple(int(i) for i in np.unravel_index(first, storage.shape)) if storage.shape else ()
    return Box(start, (1,) * len(start)), int(counts[first])
