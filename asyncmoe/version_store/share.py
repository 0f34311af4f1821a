"""Which rank writes what: every canonical element that a reader holds is written by exactly one of the ranks that hold it.

The rule is the plan from the sources to one imaginary rank that holds every cell (`asyncmoe.reshard.plan`): it is a pure function of the
layouts, gives every element one sender and levels what the ranks send. Nothing is gathered: a rank writes from its own memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from asyncmoe.errors import LayoutError
from asyncmoe.reshard.chunks import cut_boxes
from asyncmoe.reshard.layout import RankLayout, Storage
from asyncmoe.reshard.match import Match, Sources
from asyncmoe.reshard.plan import (
    COLUMNS,
    DESTINATION,
    DESTINATION_OFFSET,
    DESTINATION_STRIDES,
    EXTENTS,
    ITEM,
    Plan,
    assemble,
)
from asyncmoe.reshard.table import Side, Tensors, enumerate_tensors, tabulate
from asyncmoe.version_store.cells import Cells, bytes_of, cells_of, row_major, table_of
from asyncmoe.version_store.slabs import Slabs, filled

SLAB_BYTES = 8 << 20
OBJECT_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class RankShare:
    """What a rank writes of every version.

    Attributes:
        rank: the rank.
        slabs: what lies where in its objects.
        copies: int64[pieces, COLUMNS], as `asyncmoe.reshard.plan.Transfer.copies`: from its storages to its objects, in the order of
            `slabs.pieces`; the destination is the piece's object.
        storages: the storages that are read, by name, in the order of the copies' SOURCE.
    """

    rank: int
    slabs: Slabs
    copies: np.ndarray
    storages: Mapping[str, Storage]


@dataclass(frozen=True, eq=False)
class Sharing:
    """The shares of some ranks, and the tensors that all of them belong to."""

    tensors: Tensors
    shares: Mapping[int, RankShare]


def divide(
    tensors: Mapping[str, tuple[int, ...]],
    sources: Iterable[RankLayout],
    readers: Iterable[RankLayout],
    *,
    ranks: Iterable[int] | None = None,
    slab_bytes: int = SLAB_BYTES,
    object_bytes: int = OBJECT_BYTES,
) -> Sharing:
    """Return what ranks write, so that readers with these layouts read only what they hold. Others can read it too, in whole slabs.

    Args:
        tensors: canonical tensors and their shapes.
        sources: the layouts of all ranks that hold the weights.
        readers: layouts of ranks that will read versions. Elements are written in their dtype; what none of them holds is not written.
        ranks: whose shares to compute; None: all. Each rank may compute its own, and they are consistent.
        slab_bytes, object_bytes: bounds of a slab and of an object; a larger single element or slab gets one of its own.

    Raises:
        LayoutError: as `asyncmoe.reshard.plan`, or the readers hold a tensor in different dtypes.
    """
    if slab_bytes < 1 or object_bytes < 1:
        raise LayoutError("slab_bytes and object_bytes", got=f"{slab_bytes} and {object_bytes}", expected="positive numbers")
    numbered = enumerate_tensors(tensors)
    side = tabulate(numbered, sources)
    cells = cells_of(numbered, tabulate(numbered, readers))
    everything = int(side.ranks.max(initial=0)) + 1  # the imaginary rank
    whole = Side((table_of(cells, everything),), np.array([everything], np.int64), np.zeros(1, np.int64))
    wanted = side.ranks.tolist() if ranks is None else sorted(set(ranks))
    plan = assemble(Match(Sources(numbered, side), whole, covered=False), wanted)
    return Sharing(numbered, {rank: _share(plan, cells, rank, everything, slab_bytes, object_bytes) for rank in wanted})


def _share(plan: Plan, cells: Cells, rank: int, everything: int, slab_bytes: int, object_bytes: int) -> RankShare:
    mine = [t.copies for t in plan.transfers if (t.source, t.destination) == (rank, everything)]
    copies = mine[0].copy() if mine else np.empty((0, COLUMNS), np.int64)
    numbers = np.array([int(name) for name in plan.destinations.get(everything, {})], np.int64)
    copies[:, DESTINATION] = numbers[copies[:, DESTINATION]] if len(copies) else 0
    cell = copies[:, DESTINATION]
    copies = copies[np.lexsort((copies[:, DESTINATION_OFFSET], cell, cells.dtype[cell], cells.readers[cell]))]
    copies = cut_boxes(copies, slab_bytes)
    cell, extent = copies[:, DESTINATION], copies[:, EXTENTS]
    start = cells.start[cell] + _corner(copies[:, DESTINATION_OFFSET] // copies[:, ITEM], cells.extent[cell])
    together = np.column_stack([cells.readers[cell], cells.dtype[cell]])
    nbytes = bytes_of(cells.dtype[cell], extent)
    firsts = filled(nbytes, slab_bytes, np.flatnonzero((np.diff(together, axis=0) != 0).any(1)) + 1)
    pieces = np.column_stack([cells.tensor[cell], start, extent])
    slabs = Slabs.packed(pieces, firsts, cells.dtype[cell][firsts[:-1]], object_bytes)
    copies[:, DESTINATION], copies[:, DESTINATION_OFFSET] = 0, slabs.offsets
    copies[:, DESTINATION_STRIDES] = row_major(extent) * copies[:, ITEM][:, None]
    return RankShare(rank, slabs, copies, plan.sources.get(rank, {}))


def _corner(index: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """Return int64[n, MAX_DIMS]: the place in a box of its element number `index`, row-major."""
    return np.column_stack([index // step % n for step, n in zip(row_major(extent).T, extent.T, strict=True)])
