"""What the sources hold, and where it meets what a destination wants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncmoe.errors import LayoutError
from asyncmoe.reshard.coverage import Grid
from asyncmoe.reshard.layout import Box
from asyncmoe.reshard.table import NO_TENSOR, Table, Tensors


@dataclass(frozen=True, eq=False)
class Holdings:
    """The source's boxes made disjoint: `c` cells, each with the pieces that hold all of it.

    Attributes:
        table: the source pieces.
        tensor: int64[c], ascending.
        start, extent: int64[c, MAX_DIMS]; cells of a tensor are disjoint and cover what its pieces cover.
        ranks: the source ranks, ascending, that hold anything.
        rank_of: int64[rows of the table]; the position of a piece's rank in `ranks`.
        first: int64[c + 1]; `holders[first[i]:first[i + 1]]` are the rows of `table` that hold cell i, by ascending rank.
        holders: int64[...]
    """

    table: Table
    ranks: np.ndarray
    rank_of: np.ndarray
    tensor: np.ndarray
    start: np.ndarray
    extent: np.ndarray
    first: np.ndarray
    holders: np.ndarray


@dataclass(frozen=True, eq=False)
class Overlaps:
    """n boxes, each inside one cell and inside the box of one wanted piece.

    Attributes:
        cell: int64[n]; position in the holdings.
        row: int64[n]; row of the wanted table.
        start, extent: int64[n, MAX_DIMS]; in the tensor's coordinates.
    """

    cell: np.ndarray
    row: np.ndarray
    start: np.ndarray
    extent: np.ndarray


def join(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All (i, j) with keys[i] == wanted[j], ordered by j, then i. `keys` is ascending."""
    low = np.searchsorted(keys, wanted, "left")
    count = np.searchsorted(keys, wanted, "right") - low
    return ranges(low, count), np.repeat(np.arange(len(wanted)), count)


def ranges(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """start[0], start[0] + 1, ... (count[0] of them), start[1], ..."""
    shift: np.ndarray = np.repeat(start - np.cumsum(count) + count, count)
    return shift + np.arange(len(shift))


def hold(table: Table) -> Holdings:
    """Group source pieces by box, and cut boxes that overlap without being equal along each other's edges."""
    real = np.flatnonzero(table.tensor != NO_TENSOR)
    keys = np.column_stack([table.tensor[real], table.start[real], table.extent[real]])
    boxes, box_of = np.unique(keys, axis=0, return_inverse=True)
    box_of = box_of.reshape(-1)
    order = np.lexsort((table.rank[real], box_of))
    holders = real[order]
    first = np.concatenate([[0], np.cumsum(np.bincount(box_of, minlength=len(boxes)))])
    tensor, start, extent = boxes[:, 0], *np.split(boxes[:, 1:], 2, axis=1)
    for number in _ambiguous(tensor, start, extent):
        tensor, start, extent, first, holders = _cut(number, table, tensor, start, extent, first, holders)
    ranks, rank_of = np.unique(table.rank, return_inverse=True)
    return Holdings(table, ranks, rank_of.reshape(-1), tensor, start, extent, first, holders)


def overlaps(tensors: Tensors, holdings: Holdings, wanted: Table) -> Overlaps:
    """Where wanted pieces meet cells: for every wanted piece, boxes that make it up exactly.

    Raises:
        LayoutError: an element of a wanted piece that no source holds.
    """
    real = np.flatnonzero(wanted.tensor != NO_TENSOR)
    cell, row = join(holdings.tensor, wanted.tensor[real])
    row = real[row]
    start = np.maximum(holdings.start[cell], wanted.start[row])
    end = np.minimum(holdings.start[cell] + holdings.extent[cell], wanted.start[row] + wanted.extent[row])
    meets = (end > start).all(1)
    cell, row, start, end = cell[meets], row[meets], start[meets], end[meets]
    extent = end - start
    got = np.zeros(len(wanted.tensor), np.int64)
    np.add.at(got, row, extent.prod(1))
    missing = real[got[real] != wanted.extent[real].prod(1)]
    if len(missing):
        raise _hole(tensors, wanted, int(missing[0]), start[row == missing[0]], extent[row == missing[0]])
    return Overlaps(cell, row, start, extent)


def _ambiguous(tensor: np.ndarray, start: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """Tensors of which two different boxes overlap."""
    several = np.flatnonzero(np.bincount(tensor, minlength=1)[tensor] > 1)
    a, b = join(tensor[several], tensor[several])
    a, b = several[a[a < b]], several[b[a < b]]
    meet = ((start[a] < start[b] + extent[b]) & (start[b] < start[a] + extent[a])).all(1)
    return np.unique(tensor[a[meet]])


def _cut(
    number: int,
    table: Table,
    tensor: np.ndarray,
    start: np.ndarray,
    extent: np.ndarray,
    first: np.ndarray,
    holders: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Replace the boxes of one tensor by the cells of the grid of their edges."""
    low, high = np.searchsorted(tensor, [number, number + 1])
    boxes = [Box(tuple(s), tuple(n)) for s, n in zip(start[low:high].tolist(), extent[low:high].tolist(), strict=True)]
    grid = Grid((start[low:high] + extent[low:high]).max(0).tolist(), boxes)
    cells = grid.cells(grid.counts > 0)
    rows = holders[first[low] : first[high]]
    rows = rows[np.argsort(table.rank[rows], kind="stable")]
    new_start, new_extent = np.array([c.start for c in cells]), np.array([c.extent for c in cells])
    inside = (table.start[rows] <= new_start[:, None]) & (table.start[rows] + table.extent[rows] >= (new_start + new_extent)[:, None])
    cell, holder = np.nonzero(inside.all(2))
    counts = np.concatenate([np.diff(first[: low + 1]), np.bincount(cell, minlength=len(cells)), np.diff(first[high:])])
    return (
        np.concatenate([tensor[:low], np.full(len(cells), number), tensor[high:]]),
        np.concatenate([start[:low], new_start, start[high:]]),
        np.concatenate([extent[:low], new_extent, extent[high:]]),
        np.concatenate([[0], np.cumsum(counts)]),
        np.concatenate([holders[: first[low]], rows[holder], holders[first[high] :]]),
    )


def _hole(tensors: Tensors, wanted: Table, row: int, starts: np.ndarray, extents: np.ndarray) -> LayoutError:
    name = tensors.names[wanted.tensor[row]]
    dims = len(tensors.shapes[name])
    corner = wanted.start[row]
    found = [Box(tuple(s), tuple(n)) for s, n in zip((starts - corner).tolist(), extents.tolist(), strict=True)]
    grid = Grid(wanted.extent[row].tolist(), found)
    hole = grid.cells(grid.counts == 0)[0]
    start = tuple(int(s) for s in np.array(hole.start) + corner)
    box = Box(start[len(start) - dims :], hole.extent[len(start) - dims :])
    return LayoutError(wanted.describe(row, tensors), got=f"no source for {box} of {name}", expected="a source for every element")
