"""Elements of slabs: their canonical digests where they lie in memory, and their deltas (`asyncmoe.reshard.delta_digest`, csrc/delta.h)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.reshard.delta_digest import element_table, one_chunk, piece_copies, seeds
from asyncmoe.reshard.delta_format import HEADER_BYTES, TRAILER_BYTES
from asyncmoe.reshard.layout import RankLayout
from asyncmoe.reshard.plan import DESTINATION, DESTINATION_OFFSET
from asyncmoe.reshard.table import NO_TENSOR, STORAGE, TENSOR, Table, Tensors, tabulate


class SlabTable:
    """Reads, packs, compares and changes some slabs, each in one piece of memory.

    Args:
        table: slabs as storages (`geometry.table_of`).
        slabs: numbers of the slabs, ascending.

    Attributes:
        offsets: int64[rows]; boxes are cut into rows of bounded size, and this is where each begins in its slab, in bytes.
        firsts: int64[slabs + 1]; the rows of each of the slabs.
    """

    def __init__(self, tensors: Tensors, table: Table, slabs: Sequence[int]) -> None:
        chosen = np.zeros(len(table.storages) + 1, bool)
        chosen[np.array(slabs, np.int64)] = True
        rows = piece_copies(tensors, table, chosen[table.pieces[:, STORAGE]])
        self.firsts = np.searchsorted(rows[:, DESTINATION], [*slabs, len(table.storages)]).astype(np.int64)
        self.offsets = rows[:, DESTINATION_OFFSET].copy()
        rows[:, DESTINATION] = 0
        self._table = element_table(rows, self.firsts, seeds(tensors, ()))
        self._place = {slab: i for i, slab in enumerate(slabs)}

    def read(self, slab: int, address: int, threads: int = 1) -> int:
        """Return the digest of a slab that begins at an address."""
        return self._table.read(self._place[slab], _base(address), threads)

    def fill(self, pack: _C.Program, slab: int, sources: np.ndarray, address: int, threads: int = 1) -> int:
        """Pack a slab to an address and return its digest.

        Args:
            pack: a message for each slab of this table, of the same rows.
        """
        return _C.fill_delta_base(self._table, pack, self._place[slab], sources, address, threads)

    def encode(self, pack: _C.Program, slab: int, sources: np.ndarray, address: int, threads: int = 1) -> tuple[np.ndarray, int, int]:
        """Code what `fill` would change at an address, where the slab as it was lies.

        Returns:
            The frame (`asyncmoe.reshard.delta_format`) without header and trailer, uint8; the digest to come less the one there; the
            number of changed elements.
        """
        place = self._place[slab], sources, address, HEADER_BYTES, TRAILER_BYTES
        frame, difference, changed, _ = _C.encode_delta(self._table, pack, *place, threads)
        return frame, difference, changed

    def bound(self, slab: int) -> int:
        """Return the most bytes that the payload of a frame takes."""
        return self._table.bound(self._place[slab])

    def fault(self, slab: int, payload: int, nbytes: int, threads: int = 1) -> str | None:
        """Return what is wrong with a payload, given by its address; None if nothing is."""
        return self._table.fault(self._place[slab], payload, nbytes, threads)

    def apply(self, slab: int, payload: int, nbytes: int, address: int, threads: int = 1) -> int:
        """Write a payload without a fault into the slab at an address; return the new digest less the old one, as it was in memory."""
        return self._table.apply(self._place[slab], payload, nbytes, _base(address), True, threads)


def padding_digest(tensors: Tensors, layout: RankLayout) -> int:
    """Return the part of a shard's digest that its padding has, which is zeros."""
    table = tabulate(tensors, [layout]).tables[0]
    rows = piece_copies(tensors, table, table.pieces[:, TENSOR] == NO_TENSOR)
    return element_table(rows, one_chunk(rows), seeds(tensors, table.names)).read(0, np.zeros(len(table.names), np.int64), 1)


def _base(address: int) -> np.ndarray:
    return np.array([address], np.uint64).view(np.int64)
