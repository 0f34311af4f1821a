"""What a rank reads of a version: whole slabs, in ranges of the objects, and where their elements go in the rank's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.layout import RankLayout, Storage
from asyncmoe.reshard.match import Match, Sources
from asyncmoe.reshard.plan import (
    CAST,
    DESTINATION,
    DESTINATION_OFFSET,
    DESTINATION_STRIDES,
    EXTENTS,
    SOURCE,
    SOURCE_OFFSET,
    SOURCE_STRIDES,
    Plan,
    assemble,
)
from asyncmoe.reshard.programs import FLOAT_TO_BFLOAT, local_program, local_rows
from asyncmoe.reshard.table import Side, tabulate
from asyncmoe.version_store.cells import cells_of
from asyncmoe.version_store.geometry import Geometry
from asyncmoe.version_store.share import OBJECT_BYTES

_STORE, _READER = 0, 1


@dataclass(frozen=True)
class Range:
    """Adjacent slabs of an object, which are read together.

    Attributes:
        rank, object: the object, by positions in `Geometry.ranks` and among the rank's objects.
        begin, nbytes: place in the object.
        first, last: the slabs `first` to `last - 1` of the geometry.
        offsets: offset of each of these slabs in the range.
    """

    rank: int
    object: int
    begin: int
    nbytes: int
    first: int
    last: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """What a rank reads of every version with this geometry.

    Attributes:
        layout: of the rank.
        ranges: what is read.
        program: copies a range's slabs into the rank's storages, one chunk for each range; its sources are the slabs, as in `slabs`.
        slabs: numbers of the slabs that are read.
        gather: the reverse of `program`, from the rank's storages to the slabs; None unless `each_once`.
        zeros: fills the rank's padding; None if there is none.
        storages: the rank's storages that are written, by name, in the order of the programs' destinations.
        each_once: whether the rank stores each element of each slab exactly once and in the same dtype, so that the digest of its shard
            is the sum of the slabs' digests and its padding's.
    """

    layout: RankLayout
    ranges: tuple[Range, ...]
    program: _C.Program
    slabs: tuple[int, ...]
    gather: _C.Program | None
    zeros: _C.Program | None
    storages: Mapping[str, Storage]
    each_once: bool

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return sum(one.nbytes for one in self.ranges)


def plan_read(geometry: Geometry, layout: RankLayout, *, range_bytes: int = OBJECT_BYTES) -> ReadPlan:
    """Plan what a rank reads.

    Args:
        range_bytes: bound of a range; a larger slab gets one of its own.

    Raises:
        LayoutError: the version lacks an element of the layout, or has it in a dtype that cannot be converted; names tensor and box.
    """
    source = Side((geometry.table,), np.array([_STORE], np.int64), np.zeros(1, np.int64))
    plan = assemble(Match(Sources(geometry.tensors, source), tabulate(geometry.tensors, [layout.at(_READER)])), None)
    copies = _copies(plan, _STORE)
    if (copies[:, CAST] > FLOAT_TO_BFLOAT).any():
        what = f"rank {layout.rank}: float8"
        raise LayoutError(what, got="a version in another dtype", expected="one that was written for float8")
    copies = copies[np.argsort(copies[:, SOURCE], kind="stable")]
    slabs = tuple(int(name) for name in plan.sources.get(_STORE, {}))
    ranges = _ranges(geometry, slabs, range_bytes)
    place = {slab: i for i, slab in enumerate(slabs)}
    ends = [place[one.last - 1] + 1 for one in ranges]
    rows, casts = local_rows([copies])
    firsts = np.searchsorted(copies[:, SOURCE], [0, *ends]).astype(np.int64)
    held = sum(storage.size for storage in plan.sources.get(_STORE, {}).values())
    taken = int(copies[:, EXTENTS].prod(1).sum())
    once = not copies[:, CAST].any() and held == taken == _distinct(geometry, layout)
    program = _C.Program(rows, firsts, "none", casts)
    gather = _C.Program(local_rows([_reversed(copies)])[0], firsts, "none") if once else None
    zeros = local_program([_copies(plan, _READER)])
    return ReadPlan(layout, ranges, program, slabs, gather, zeros, plan.destinations.get(_READER, {}), once)


def _reversed(copies: np.ndarray) -> np.ndarray:
    """Return the copies back, which convert nothing."""
    ends = [SOURCE, SOURCE_OFFSET, *range(CAST)[SOURCE_STRIDES]], [DESTINATION, DESTINATION_OFFSET, *range(CAST)[DESTINATION_STRIDES]]
    back = copies.copy()
    back[:, ends[0]], back[:, ends[1]] = copies[:, ends[1]], copies[:, ends[0]]
    return back


def _distinct(geometry: Geometry, layout: RankLayout) -> int:
    """Return how many different elements a rank holds."""
    try:
        return int(cells_of(geometry.tensors, tabulate(geometry.tensors, [layout])).extent.prod(1).sum())
    except LayoutError:  # a layout that cuts a tensor in very many ways
        return -1


def _copies(plan: Plan, source: int) -> np.ndarray:
    found = [t.copies for t in plan.transfers if t.source == source]
    return found[0].copy() if found else np.empty((0, CAST + 1), np.int64)


def _ranges(geometry: Geometry, slabs: tuple[int, ...], range_bytes: int) -> tuple[Range, ...]:
    """Join neighbouring slabs of an object."""
    ranges: list[Range] = []
    for slab in slabs:
        rank = int(geometry.slab_rank[slab])
        one, local = geometry.ranks[rank], slab - int(geometry.first_slabs[rank])
        number = int(np.searchsorted(one.objects, local, "right")) - 1
        begin, nbytes = int(one.slab_offsets[local]), int(one.slab_bytes[local])
        last = ranges[-1] if ranges else None
        if last and (last.rank, last.object, last.last) == (rank, number, slab) and begin + nbytes - last.begin <= range_bytes:
            ranges[-1] = Range(
                rank, number, last.begin, begin + nbytes - last.begin, last.first, slab + 1, (*last.offsets, begin - last.begin)
            )
        else:
            ranges.append(Range(rank, number, begin, nbytes, slab, slab + 1, (0,)))
    return tuple(ranges)
