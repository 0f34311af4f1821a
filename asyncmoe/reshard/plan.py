"""From two layouts to the copies that turn one into the other.

For every destination piece, its overlaps with what the sources hold become strided copies, grouped by (source rank, destination
rank). The plan is a pure function of its arguments, so every rank can compute it alone and get the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from asyncmoe.errors import LayoutError
from asyncmoe.reshard.coverage import check_destination
from asyncmoe.reshard.layout import ITEM_BYTES, MAX_DIMS, RankLayout, Storage
from asyncmoe.reshard.overlap import Holdings, Overlaps, hold, overlaps
from asyncmoe.reshard.share import share
from asyncmoe.reshard.table import DTYPES, NO_TENSOR, Table, Tensors, enumerate_tensors, tabulate

SOURCE, SOURCE_OFFSET, DESTINATION, DESTINATION_OFFSET, WIRE_OFFSET, ITEM = range(6)
EXTENTS = slice(6, 6 + MAX_DIMS)
SOURCE_STRIDES = slice(6 + MAX_DIMS, 6 + 2 * MAX_DIMS)
DESTINATION_STRIDES = slice(6 + 2 * MAX_DIMS, 6 + 3 * MAX_DIMS)
COLUMNS = 6 + 3 * MAX_DIMS
_ITEM_BYTES = np.array([ITEM_BYTES[name] for name in DTYPES], np.int64)
NO_SOURCE = -1
"""In column `SOURCE`: fill the destination with zeros."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """All copies from one rank to another (or within one rank).

    Attributes:
        source, destination: ranks.
        nbytes: bytes on the wire, 0 within one rank.
        copies: int64[n, COLUMNS]. Columns SOURCE and DESTINATION are positions in `Plan.sources[source]` and
            `Plan.destinations[destination]`; WIRE_OFFSET is where the copied box lies, row-major, in the message; ITEM is the
            size of an element; offsets and strides are in bytes.
    """

    source: int
    destination: int
    nbytes: int
    copies: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """Copies that write every destination element exactly once.

    Attributes:
        sources: by rank, the storages that are read. A source storage nobody needs is not among them.
        destinations: by rank, the storages that are written, all of them completely.
        transfers: sorted by (source, destination).
    """

    sources: Mapping[int, Mapping[str, Storage]]
    destinations: Mapping[int, Mapping[str, Storage]]
    transfers: tuple[Transfer, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes that travel between ranks."""
        return sum(t.nbytes for t in self.transfers)

    @property
    def egress(self) -> dict[int, int]:
        """Bytes each source rank sends to others."""
        sent = dict.fromkeys(self.sources, 0)
        for transfer in self.transfers:
            sent[transfer.source] = sent.get(transfer.source, 0) + transfer.nbytes
        return sent

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole plan; ranks that are to execute one plan together must have the same."""
        state = hashlib.sha256()
        for side in (self.sources, self.destinations):
            state.update(repr([(rank, [(n, s.shape, s.dtype) for n, s in storages.items()]) for rank, storages in side.items()]).encode())
        for transfer in self.transfers:
            state.update(np.array([transfer.source, transfer.destination, transfer.nbytes, len(transfer.copies)], "<i8").tobytes())
            state.update(transfer.copies.astype("<i8", copy=False).tobytes())
        return state.hexdigest()


def plan(tensors: Mapping[str, tuple[int, ...]], source: Sequence[RankLayout], destination: Sequence[RankLayout]) -> Plan:
    """Plan the copies from `source` to `destination`.

    A rank number names a process: a source and a destination layout of the same rank share a memory, and what one needs from
    the other is copied without the wire. Where several sources hold the same elements, they share the load.

    Args:
        tensors: canonical tensors and their shapes; those no destination piece names do not matter.
        source, destination: layouts, at most one a rank each.

    Raises:
        LayoutError: an unknown tensor or storage, a box out of bounds, destination pieces that overlap in their storage or leave
            holes, an element that no source has, or a tensor with different dtypes; naming rank, tensor and box.
    """
    return plan_each(tensors, source, [destination])[0]


def plan_each(
    tensors: Mapping[str, tuple[int, ...]], source: Sequence[RankLayout], destinations: Sequence[Sequence[RankLayout]]
) -> list[Plan]:
    """One plan for each of several destinations (buckets, say) from the same source; as `plan`, with the source read once."""
    numbered = enumerate_tensors(tensors)
    holdings = hold(tabulate(numbered, source))
    return [_plan(numbered, holdings, destination) for destination in destinations]


def _plan(tensors: Tensors, holdings: Holdings, destination: Sequence[RankLayout]) -> Plan:
    held, wanted = holdings.table, tabulate(tensors, destination)
    for layout in destination:
        check_destination(layout)
    found, holder = share(holdings, wanted, overlaps(tensors, holdings, wanted))
    _check_dtypes(tensors, held, wanted, found, holder)
    padding = np.flatnonzero(wanted.tensor == NO_TENSOR)
    row = np.concatenate([found.row, padding])
    holder = np.concatenate([holder, np.full(len(padding), NO_SOURCE)])
    start = np.concatenate([found.start, wanted.start[padding]])
    extent = np.concatenate([found.extent, wanted.extent[padding]])
    copies = _copies(held, wanted, row, holder, start, extent)
    sender = np.where(holder == NO_SOURCE, wanted.rank[row], held.rank[holder]) if len(held.rank) else wanted.rank[row]
    return _grouped(held, wanted, copies, sender, wanted.rank[row])


def _check_dtypes(tensors: Tensors, held: Table, wanted: Table, found: Overlaps, holder: np.ndarray) -> None:
    differ = np.flatnonzero(held.dtype[holder] != wanted.dtype[found.row])
    if len(differ):
        row, source = int(found.row[differ[0]]), int(holder[differ[0]])
        got = f"{DTYPES[wanted.dtype[row]]}, but {DTYPES[held.dtype[source]]} in {held.describe(source, tensors)}"
        raise LayoutError(wanted.describe(row, tensors), got=got, expected="one dtype for a tensor in source and destination")


def _copies(held: Table, wanted: Table, row: np.ndarray, holder: np.ndarray, start: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """Columns of `Transfer.copies`, but SOURCE and DESTINATION as positions in the tables' storages, and no WIRE_OFFSET yet."""
    item = _ITEM_BYTES[wanted.dtype[row]]
    copies = np.zeros((len(row), COLUMNS), np.int64)
    real = holder != NO_SOURCE
    copies[:, SOURCE] = NO_SOURCE
    if real.any():
        source = holder[real]
        copies[real, SOURCE] = held.storage[source]
        copies[real, SOURCE_OFFSET] = held.offset[source] + ((start[real] - held.start[source]) * held.strides[source]).sum(1)
        copies[real, SOURCE_STRIDES] = held.strides[source]
    copies[:, DESTINATION] = wanted.storage[row]
    copies[:, DESTINATION_OFFSET] = wanted.offset[row] + ((start - wanted.start[row]) * wanted.strides[row]).sum(1)
    copies[:, DESTINATION_STRIDES] = wanted.strides[row]
    for column in (SOURCE_OFFSET, DESTINATION_OFFSET):
        copies[:, column] *= item
    for columns in (SOURCE_STRIDES, DESTINATION_STRIDES):
        copies[:, columns] *= item[:, None]
    copies[:, ITEM] = item
    copies[:, EXTENTS] = extent
    return copies


def _grouped(held: Table, wanted: Table, copies: np.ndarray, sender: np.ndarray, receiver: np.ndarray) -> Plan:
    """Sort copies into transfers, lay out each message, and number the storages that are used within their rank."""
    order = np.lexsort((copies[:, DESTINATION_OFFSET], copies[:, DESTINATION], receiver, sender))
    copies, sender, receiver = copies[order], sender[order], receiver[order]
    sources, copies[:, SOURCE] = _numbered(held, copies[:, SOURCE])
    destinations, copies[:, DESTINATION] = _numbered(wanted, copies[:, DESTINATION])
    changes = np.flatnonzero((np.diff(sender) != 0) | (np.diff(receiver) != 0)) + 1
    nbytes = copies[:, EXTENTS].prod(1) * copies[:, ITEM]
    transfers = []
    for begin, end in zip([0, *changes], [*changes, len(copies)], strict=True):
        if begin == end:
            continue
        group = copies[begin:end]
        source, destination = int(sender[begin]), int(receiver[begin])
        total = 0
        if source != destination:
            group[:, WIRE_OFFSET] = np.cumsum(nbytes[begin:end]) - nbytes[begin:end]
            total = int(nbytes[begin:end].sum())
        group.flags.writeable = False
        transfers.append(Transfer(source, destination, total, group))
    return Plan(sources, destinations, tuple(transfers))


def _numbered(table: Table, column: np.ndarray) -> tuple[dict[int, dict[str, Storage]], np.ndarray]:
    """The storages a column names, by rank, and the column with their positions within their rank (`NO_SOURCE` stays)."""
    used = np.unique(column[column != NO_SOURCE])
    storages: dict[int, dict[str, Storage]] = {}
    position = np.full(len(table.storages) + 1, NO_SOURCE)
    for number in used.tolist():
        rank, name, storage = table.storages[number]
        mine = storages.setdefault(rank, {})
        position[number] = len(mine)
        mine[name] = storage
    return storages, position[column]
