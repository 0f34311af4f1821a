"""Cells: the boxes into which the readers' layouts cut the canonical tensors.

All elements of a cell are held by the same readers. Cells are the unit of what is written together, so that what a reader needs lies in
as few and as long ranges as possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from asyncmoe.errors import LayoutError
from asyncmoe.reshard.layout import MAX_DIMS, Storage
from asyncmoe.reshard.table import (
    DTYPE,
    DTYPE_BYTES,
    DTYPES,
    EXTENT,
    NO_TENSOR,
    OFFSET,
    START,
    STORAGE,
    STRIDES,
    TENSOR,
    Side,
    Table,
    Tensors,
)

_MOST_CELLS = 4096
"""Of one tensor."""
_COLUMNS = [TENSOR, DTYPE, *range(START.start, EXTENT.stop)]


@dataclass(frozen=True, eq=False)
class Cells:
    """n disjoint cells that together hold all that any reader holds, ordered by tensor.

    Attributes:
        tensor, dtype, readers: int64[n]; number of the tensor, position in `DTYPES`, number of the set of readers' layouts that hold it.
        start, extent: int64[n, MAX_DIMS]; padded in front as in `asyncmoe.reshard.table`.
    """

    tensor: np.ndarray
    dtype: np.ndarray
    readers: np.ndarray
    start: np.ndarray
    extent: np.ndarray


def cells_of(tensors: Tensors, readers: Side) -> Cells:
    """Cut the tensors along the boxes of all readers.

    Raises:
        LayoutError: readers hold a tensor in different dtypes, or cut it in too many ways.
    """
    parts = [np.column_stack([np.full(len(t.pieces), i, np.int64), t.pieces[:, _COLUMNS]]) for i, t in enumerate(readers.tables)]
    rows = np.concatenate([np.empty((0, 1 + len(_COLUMNS)), np.int64), *parts])
    rows = rows[rows[:, 1] != NO_TENSOR]
    rows = rows[np.argsort(rows[:, 1], kind="stable")]
    edges = np.flatnonzero(np.diff(rows[:, 1], prepend=-1))
    cut: dict[bytes, tuple[np.ndarray, list[tuple[int, ...]]]] = {}  # of tensors that are cut alike, such as experts
    boxes, sets, tensor, dtype = [np.empty((0, 2 * MAX_DIMS), np.int64)], list[tuple[int, ...]](), list[int](), list[int]()
    for held in np.split(rows, edges[1:]) if len(rows) else ():
        number, kind = int(held[0, 1]), int(held[0, 2])
        if (held[:, 2] != kind).any():
            other = DTYPES[int(held[held[:, 2] != kind][0, 2])]
            raise LayoutError(f"tensor {tensors.names[number]}", got=f"{DTYPES[kind]} and {other}", expected="one dtype in all readers")
        key = held[:, [0, *range(3, held.shape[1])]].tobytes()
        if key not in cut:
            cut[key] = _cut(held[:, 0], held[:, 3:], tensors.names[number])
        boxes.append(cut[key][0])
        sets += cut[key][1]
        tensor += [number] * len(cut[key][1])
        dtype += [kind] * len(cut[key][1])
    order = {one: i for i, one in enumerate(sorted(set(sets)))}
    box = np.concatenate(boxes)
    numbers = np.array([order[one] for one in sets], np.int64)
    return Cells(np.array(tensor, np.int64), np.array(dtype, np.int64), numbers, box[:, :MAX_DIMS], box[:, MAX_DIMS:])


def _cut(tables: np.ndarray, boxes: np.ndarray, name: str) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Return the cells of one tensor as int64[n, start and extent], and the tables that hold each."""
    low, high = boxes[:, :MAX_DIMS], boxes[:, :MAX_DIMS] + boxes[:, MAX_DIMS:]
    edges = [np.unique(np.concatenate([low[:, k], high[:, k]])).tolist() for k in range(MAX_DIMS)]
    count = int(np.prod([len(one) - 1 for one in edges]))
    if count > _MOST_CELLS:
        raise LayoutError(f"tensor {name}", got=f"{count} boxes between the readers", expected=f"at most {_MOST_CELLS}")
    found, sets = [], []
    for corner in product(*map(pairwise, edges)):
        first, last = np.array([a for a, _ in corner]), np.array([b for _, b in corner])
        holding = tuple(sorted(set(tables[((low <= first) & (high >= last)).all(1)].tolist())))
        if holding:
            found.append([*first, *(last - first)])
            sets.append(holding)
    return np.array(found, np.int64).reshape(-1, 2 * MAX_DIMS), sets


def table_of(cells: Cells, rank: int) -> Table:
    """Return the layout of a rank that holds every cell as a storage of its own, named by the cell's number."""
    n = len(cells.tensor)
    pieces = np.zeros((n, 4 + 3 * MAX_DIMS), np.int64)
    pieces[:, TENSOR], pieces[:, STORAGE], pieces[:, DTYPE], pieces[:, OFFSET] = cells.tensor, np.arange(n), cells.dtype, 0
    pieces[:, START], pieces[:, EXTENT], pieces[:, STRIDES] = cells.start, cells.extent, row_major(cells.extent)
    made: dict[tuple[int, ...], Storage] = {}
    shapes = np.column_stack([cells.dtype, cells.extent]).tolist()
    storages = tuple(made.setdefault(tuple(one), Storage(tuple(one[1:]), DTYPES[one[0]])) for one in shapes)
    return Table(rank, tuple(map(str, range(n))), storages, cells.extent, pieces)


def row_major(extent: np.ndarray) -> np.ndarray:
    """Return int64[n, MAX_DIMS]: strides in elements of boxes stored row-major."""
    strides: np.ndarray = np.ones_like(extent)
    for k in range(MAX_DIMS - 2, -1, -1):
        strides[:, k] = strides[:, k + 1] * extent[:, k + 1]
    return strides


def bytes_of(dtype: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """Return int64[n]: bytes of boxes."""
    nbytes: np.ndarray = extent.prod(1) * DTYPE_BYTES[dtype]
    return nbytes
