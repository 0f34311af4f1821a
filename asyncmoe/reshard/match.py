"""Match sources with destinations: decide which rank sends which elements to which (csrc/plan.h does the work)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.coverage import check_coverage
from asyncmoe.reshard.layout import MAX_DIMS, Box
from asyncmoe.reshard.table import DTYPE, DTYPE_BYTES, DTYPES, EXTENT, START, TENSOR, Side, Tensors

RULES = "asyncmoe.reshard 5"
"""Part of every digest; change it whenever the rules of sharing or cutting change."""


_CASTS = [
    (DTYPES.index("float32"), DTYPES.index("bfloat16"), 1),
    (DTYPES.index("float32"), DTYPES.index("float8_e4m3fn"), 2),
    (DTYPES.index("bfloat16"), DTYPES.index("float8_e4m3fn"), 3),
]
"""The allowed conversions: (source dtype, destination dtype, cast of csrc/cast.h)."""


class Sources:
    """The elements of the sources, cut into disjoint cells.

    Raises:
        LayoutError: two elements at the same location of a storage, or boxes of one tensor whose overlaps cut it into too many cells.
    """

    def __init__(self, tensors: Tensors, side: Side) -> None:
        self.tensors, self.side = tensors, side
        for table in side.tables:
            check_coverage(tensors, table, covered=False)
        try:
            self.holdings = _C.Holdings([table.pieces for table in side.tables], side.ranks, side.table_of, len(tensors.extent))
        except ValueError as error:
            got, expected = "boxes of one tensor that overlap in too many ways", "boxes that are equal, disjoint or cut along few lines"
            raise LayoutError("source layouts", got=got, expected=expected) from error


class Match:
    """Sources matched with destinations: every element of a destination has exactly one source rank that sends it.

    Raises:
        LayoutError: destination pieces that overlap in their storage or leave holes, an element without a source, or a tensor whose source
            dtype cannot be converted to its destination dtype; names rank, tensor and box.
    """

    def __init__(self, sources: Sources, side: Side) -> None:
        self.sources, self.side = sources, side
        for table in side.tables:
            check_coverage(sources.tensors, table, covered=True)
        pieces = [table.pieces for table in side.tables]
        self._matching = _C.Matching(sources.holdings, pieces, side.ranks, side.table_of, DTYPE_BYTES, _CASTS)
        if self._matching.fault is not None:
            raise self._error(*self._matching.fault)

    @property
    def ranks(self) -> list[int]:
        """All ranks, sources and destinations."""
        return sorted({*self.sources.side.ranks.tolist(), *self.side.ranks.tolist()})

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that determines the copies: the tensors, the layouts of all ranks, and `RULES`."""
        tensors = self.sources.tensors
        state = hashlib.sha256(RULES.encode())
        state.update("\0".join(tensors.names).encode())
        state.update(tensors.extent.astype("<i8").tobytes())
        self.sources.side.update(state)
        self.side.update(state)
        return state.hexdigest()

    def part(self, ranks: Iterable[int]) -> tuple[np.ndarray, list[tuple[int, int, int, int]]]:
        """Return the copies with one of `ranks` as source or destination.

        Returns:
            int64[n, columns of csrc/plan.h], and for each pair of ranks, in order: (source, destination, bytes on the wire, index after the
            pair's last copy).
        """
        return self._matching.part(np.array(sorted({*ranks} & {*self.ranks}), np.int64))

    def traffic(self) -> np.ndarray:
        """Return int64[n, 3]: source, destination and bytes of every pair of different ranks that exchange anything."""
        found = self._matching.traffic()
        pairs, place = np.unique(found[:, :2], axis=0, return_inverse=True)
        nbytes = np.zeros(len(pairs), np.int64)
        np.add.at(nbytes, place.reshape(-1), found[:, 2])
        return np.column_stack([pairs, nbytes])

    def _error(self, dtype: bool, table: int, row: int, source_table: int, source_row: int) -> LayoutError:
        wanted, tensors = self.side.tables[table], self.sources.tensors
        if not dtype:
            return self._hole(table, row)
        held = self.sources.side.tables[source_table]
        theirs = DTYPES[held.pieces[source_row, DTYPE]]
        got = f"{DTYPES[wanted.pieces[row, DTYPE]]}, but {theirs} in {held.describe(source_row, tensors)}"
        return LayoutError(
            wanted.describe(row, tensors),
            got=got,
            expected="the same dtype, or float32 -> bfloat16, or float32/bfloat16 -> float8",
        )

    def _hole(self, table: int, row: int) -> LayoutError:
        wanted, tensors = self.side.tables[table], self.sources.tensors
        piece = wanted.pieces[row]
        start, missing = piece[START], np.ones(piece[EXTENT], bool)
        for cell in self.sources.holdings.cells(int(piece[TENSOR])):
            low, size = np.maximum(cell[:MAX_DIMS] - start, 0), cell[MAX_DIMS:]
            missing[tuple(slice(a, max(a, b)) for a, b in zip(low, cell[:MAX_DIMS] + size - start, strict=True))] = False
        name = tensors.names[piece[TENSOR]]
        first = MAX_DIMS - len(tensors.shapes[name])
        box = Box(tuple((np.argwhere(missing)[0] + start)[first:].tolist()), (1,) * (MAX_DIMS - first))
        return LayoutError(wanted.describe(row, tensors), got=f"no source for {box} of {name}", expected="a source for every element")
