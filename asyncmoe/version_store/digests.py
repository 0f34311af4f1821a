"""Canonical digests of slabs where they lie in memory (`asyncmoe.reshard.delta_digest`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncmoe.reshard.delta_digest import element_table, one_chunk, piece_copies, seeds
from asyncmoe.reshard.layout import RankLayout
from asyncmoe.reshard.plan import DESTINATION
from asyncmoe.reshard.table import NO_TENSOR, STORAGE, TENSOR, Table, Tensors, tabulate


class SlabDigests:
    """Computes the digests of some slabs.

    Args:
        table: slabs as storages (`geometry.table_of`).
        slabs: numbers of the slabs, ascending.
    """

    def __init__(self, tensors: Tensors, table: Table, slabs: Sequence[int]) -> None:
        chosen = np.zeros(len(table.storages) + 1, bool)
        chosen[np.array(slabs, np.int64)] = True
        rows = piece_copies(tensors, table, chosen[table.pieces[:, STORAGE]])
        firsts = np.searchsorted(rows[:, DESTINATION], [*slabs, len(table.storages)]).astype(np.int64)
        rows[:, DESTINATION] = 0
        self._table = element_table(rows, firsts, seeds(tensors, ()))
        self._place = {slab: i for i, slab in enumerate(slabs)}

    def read(self, slab: int, address: int, threads: int = 1) -> int:
        """Return the digest of a slab that begins at an address."""
        return self._table.read(self._place[slab], np.array([address], np.uint64).view(np.int64), threads)


def padding_digest(tensors: Tensors, layout: RankLayout) -> int:
    """Return the part of a shard's digest that its padding has, which is zeros."""
    table = tabulate(tensors, [layout]).tables[0]
    rows = piece_copies(tensors, table, table.pieces[:, TENSOR] == NO_TENSOR)
    return element_table(rows, one_chunk(rows), seeds(tensors, table.names)).read(0, np.zeros(len(table.names), np.int64), 1)
