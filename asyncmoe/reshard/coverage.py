"""Exact tests that pieces cover every element of a storage exactly once, and the location of the first fault.

A storage of which every piece is a box is tested without looking at elements (csrc/pieces.cpp), at a cost that depends on the number of
boxes. A storage that fails this test, or has a piece that is not a box of it, is tested element by element.
"""

from __future__ import annotations

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.layout import Box
from asyncmoe.reshard.table import EXTENT, OFFSET, STORAGE, STRIDES, TENSOR, Table, Tensors


def check_source(tensors: Tensors, table: Table) -> None:
    """Reject a layout that puts two tensor elements in the same location.

    Raises:
        LayoutError: names the rank, the storage, its first element covered by more than one piece, and the tensors of these pieces.
    """
    _check(tensors, table, covered=False)


def check_destination(tensors: Tensors, table: Table) -> None:
    """Reject a layout whose pieces do not cover each element of each storage exactly once.

    Raises:
        LayoutError: names the rank, the storage, its first element not covered exactly once, and the tensors of the pieces there.
    """
    _check(tensors, table, covered=True)


def _check(tensors: Tensors, table: Table, *, covered: bool) -> None:
    for number in _C.doubtful_storages(table.pieces, table.shapes, covered):
        storage, pieces = table.storages[number], table.pieces[table.pieces[:, STORAGE] == number]
        counts = np.zeros(storage.size, np.int32)
        for piece in pieces:
            np.add.at(counts, _places(piece), 1)
        wrong = np.flatnonzero((counts != 1) if covered else (counts > 1))
        if len(wrong):
            first = int(wrong[0])
            start = tuple(int(i) for i in np.unravel_index(first, storage.shape)) if storage.shape else ()
            held = [tensors.names[piece[TENSOR]] for piece in pieces if first in _places(piece)]
            raise LayoutError(
                f"rank {table.rank}: storage {table.names[number]} box {Box(start, (1,) * len(start))}",
                got=f"{counts[first]} pieces" + (f" ({', '.join(held)})" if held else ""),
                expected="exactly 1 (a PADDING piece where no tensor lies)" if covered else "1 at most",
            )


def _places(piece: np.ndarray) -> np.ndarray:
    """Return int64[elements of the piece]: the indices of the elements that it covers in its storage."""
    places = piece[OFFSET : OFFSET + 1]
    for n, stride in zip(piece[EXTENT], piece[STRIDES], strict=True):
        places = np.add.outer(places, np.arange(n) * stride).reshape(-1)
    return places
