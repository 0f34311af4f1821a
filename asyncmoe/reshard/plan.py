"""Compute the copies that turn one layout into another.

The overlaps of every destination piece with the source pieces become strided copies, grouped by (source rank, destination rank). The plan
is a pure function of its arguments, so every rank can compute its own part independently, and the parts are consistent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from asyncmoe.reshard.layout import MAX_DIMS, RankLayout, Storage
from asyncmoe.reshard.match import Match, Sources
from asyncmoe.reshard.table import Side, enumerate_tensors, tabulate

SOURCE, SOURCE_OFFSET, DESTINATION, DESTINATION_OFFSET, WIRE_OFFSET, ITEM = range(6)
EXTENTS = slice(6, 6 + MAX_DIMS)
SOURCE_STRIDES = slice(6 + MAX_DIMS, 6 + 2 * MAX_DIMS)
DESTINATION_STRIDES = slice(6 + 2 * MAX_DIMS, 6 + 3 * MAX_DIMS)
CAST = 6 + 3 * MAX_DIMS
TENSOR = CAST + 1
START = slice(TENSOR + 1, TENSOR + 1 + MAX_DIMS)
COLUMNS = TENSOR + 1 + MAX_DIMS
NO_SOURCE = -1
"""Value in column `SOURCE`: fill the destination with zeros."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """All copies from one rank to another (or within one rank).

    Attributes:
        source, destination: ranks.
        nbytes: bytes on the wire, 0 within one rank.
        copies: int64[n, COLUMNS]. Columns SOURCE and DESTINATION are positions in `Plan.sources[source]` and
            `Plan.destinations[destination]`; WIRE_OFFSET is the offset of the copied box, row-major, in the message; ITEM is the
            size of an element in the destination and in the message; CAST is the conversion from the source's dtype, as numbered in
            csrc/cast.h; offsets and strides are in bytes. TENSOR and START are the canonical tensor's number (`asyncmoe.reshard.table`) and
            where the box begins in it.
    """

    source: int
    destination: int
    nbytes: int
    copies: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """Copies that write every destination element exactly once, or the part of them that involves given ranks.

    A part contains exactly the transfers of its ranks, in either direction. For its own ranks, `sources`, `destinations` and
    `transfers` equal the whole plan's; for other ranks they contain only the storages that its transfers read or write.

    Attributes:
        sources: by rank, the storages that are read. Source storages that no destination needs are omitted.
        destinations: by rank, the storages that are written, each completely.
        transfers: sorted by (source, destination).
        match: the match that the plan was assembled from.
    """

    sources: Mapping[int, Mapping[str, Storage]]
    destinations: Mapping[int, Mapping[str, Storage]]
    transfers: tuple[Transfer, ...]
    match: Match = field(repr=False)

    @property
    def wire_bytes(self) -> int:
        """Bytes sent between ranks."""
        return sum(t.nbytes for t in self.transfers)

    @property
    def egress(self) -> dict[int, int]:
        """Bytes each source rank sends to other ranks."""
        sent = dict.fromkeys(self.sources, 0)
        for transfer in self.transfers:
            sent[transfer.source] = sent.get(transfer.source, 0) + transfer.nbytes
        return sent

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole plan, even for a part: ranks that execute a plan together must have the same digest.

        It is computed from the plan's inputs (tensors, layouts of all ranks, version of the rules), which is much cheaper for a rank than
        computing all copies.
        """
        return self.match.digest


def plan(
    tensors: Mapping[str, tuple[int, ...]],
    source: Iterable[RankLayout],
    destination: Iterable[RankLayout],
    *,
    ranks: Iterable[int] | None = None,
) -> Plan:
    """Plan the copies from `source` to `destination`.

    A rank number names a process: source and destination layouts of the same rank are in one process's memory, and elements are copied
    between them without a message. If several sources have the same elements, they share the load.

    Args:
        tensors: canonical tensors and their shapes; tensors that no destination piece names have no effect.
        source, destination: layouts, at most one of each per rank. Layouts derived from one by `RankLayout.at` cost as much to plan as one.
        ranks: the ranks whose part to compute; None: all. The time grows with the number of distinct layouts and the size of the part.

    Raises:
        LayoutError: an unknown tensor or storage, a box out of bounds, destination pieces that overlap in their storage or leave
            holes, an element that no source holds, or a tensor with different dtypes; names rank, tensor and box.
            The only differences allowed are float32 in the source with bfloat16 in the destination, and either of them in the source with
            float8 in the destination (`asyncmoe.reshard.float8`): elements are rounded to nearest (ties to even) as they are packed or
            copied, and all bytes are counted in the destination's dtype.
    """
    return plan_each(tensors, source, [destination], ranks=ranks)[0]


def plan_each(
    tensors: Mapping[str, tuple[int, ...]],
    source: Iterable[RankLayout],
    destinations: Sequence[Iterable[RankLayout]],
    *,
    ranks: Iterable[int] | None = None,
) -> list[Plan]:
    """Return one plan for each of several destinations (such as buckets) from the same source; as `plan`, but the source is read once."""
    numbered = enumerate_tensors(tensors)
    sources = Sources(numbered, tabulate(numbered, source))
    wanted = None if ranks is None else set(ranks)
    return [assemble(Match(sources, tabulate(numbered, destination)), wanted) for destination in destinations]


def assemble(match: Match, ranks: Iterable[int] | None) -> Plan:
    """Return the plan of a match, or the part of it that involves given ranks."""
    copies, pairs = match.part(match.ranks if ranks is None else ranks)
    ends = np.array([last for *_, last in pairs], np.int64)
    counts = np.diff(ends, prepend=0)
    sender = np.repeat(np.array([pair[0] for pair in pairs], np.int64), counts)
    receiver = np.repeat(np.array([pair[1] for pair in pairs], np.int64), counts)
    sources = _number(match.sources.side, sender, copies[:, SOURCE])
    destinations = _number(match.side, receiver, copies[:, DESTINATION])
    copies.flags.writeable = False
    transfers = tuple(
        Transfer(source, destination, nbytes, copies[last - count : last])
        for (source, destination, nbytes, last), count in zip(pairs, counts.tolist(), strict=True)
    )
    return Plan(sources, destinations, transfers, match)


def _number(side: Side, rank: np.ndarray, column: np.ndarray) -> dict[int, dict[str, Storage]]:
    """Return the storages that a column names, by rank. Replace the column's values by positions within their rank (`NO_SOURCE` stays)."""
    used: dict[int, dict[str, Storage]] = {}
    order = np.argsort(rank, kind="stable")
    edges = np.flatnonzero(np.diff(rank[order], prepend=-1)) if len(rank) else order
    for rows in np.split(order, edges[1:]):
        number = column[rows]
        real = rows[number != NO_SOURCE]
        if len(real):
            mine = int(rank[real[0]])
            table = side.table(mine)
            found, place = np.unique(column[real], return_inverse=True)
            column[real] = place.reshape(-1)
            used[mine] = {table.names[i]: table.storages[i] for i in found.tolist()}
    return used
