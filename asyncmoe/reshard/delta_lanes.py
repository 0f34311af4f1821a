"""Cut transfers into the messages of deltas, identically on both ends, and find which element of which tensor each element is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.reshard.chunks import Chunks, cut_boxes, message_strides
from asyncmoe.reshard.delta_digest import BLOCK_BYTES, element_table, tensor_strides
from asyncmoe.reshard.layout import ITEM_BYTES, MAX_DIMS, whole_number
from asyncmoe.reshard.plan import (
    COLUMNS,
    DESTINATION,
    DESTINATION_OFFSET,
    DESTINATION_STRIDES,
    EXTENTS,
    ITEM,
    NO_SOURCE,
    SOURCE,
    SOURCE_OFFSET,
    SOURCE_STRIDES,
    WIRE_OFFSET,
    Plan,
    Transfer,
)

FORMAT = "asyncmoe delta 1"
"""Part of every lane's identity; change it whenever the code of a delta or the rules of cutting change."""
MESSAGE_BYTES = 64 << 20
"""A delta message covers at most so many bytes of the dense message."""
_LARGEST_ITEM = max(ITEM_BYTES.values())


@dataclass(frozen=True, eq=False)
class DeltaLane:
    """A transfer, cut into the messages of a delta. Zeros for padding are left out: they do not change.

    Attributes:
        source, destination: ranks; equal for what a rank copies from its own sources.
        identity: 64 bits that both ends compute from the plan, the transfer and the rules of cutting.
        chunks: the messages as they would be if they were dense.
        elements: int64[n, COLUMNS]; as `chunks.copies`, but the source is the canonical tensor: its number, and offset and strides in it,
            in elements times ITEM.
    """

    source: int
    destination: int
    identity: int
    chunks: Chunks
    elements: np.ndarray

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def element_count(self) -> int:
        """Elements in all messages."""
        return int(self.elements[:, EXTENTS].prod(1).sum())

    def sends_like(self, other: DeltaLane) -> bool:
        """Whether both lanes send the same bytes, under the same identity: their destinations have equal layouts."""
        if self.identity != other.identity or self.chunks.copies.shape != other.chunks.copies.shape:
            return False
        read = [SOURCE, SOURCE_OFFSET, *range(WIRE_OFFSET, COLUMNS)]
        return bool(
            (self.chunks.copies[:, read] == other.chunks.copies[:, read]).all()
            and (self.elements[:, read] == other.elements[:, read]).all()
        )

    def stored(self, seed: np.ndarray) -> _C.DeltaTable:
        """Return the table of elements as they lie in the destination's storages."""
        return element_table(self.elements, self.chunks.firsts, seed)

    def sent(self, seed: np.ndarray) -> _C.DeltaTable:
        """Return the table of elements as they lie in the dense messages."""
        rows = self.elements.copy()
        rows[:, DESTINATION], rows[:, DESTINATION_OFFSET] = 0, rows[:, WIRE_OFFSET]
        rows[:, DESTINATION_STRIDES] = message_strides(rows)
        return element_table(rows, self.chunks.firsts, seed)


def lanes_of(plan: Plan, chosen: Callable[[Transfer], bool], message_bytes: int) -> list[DeltaLane]:
    """Return the lanes of some transfers of a plan; a transfer that only fills padding has none.

    Raises:
        LayoutError: `message_bytes` is less than the largest element.
    """
    message_bytes = whole_number(message_bytes, "message_bytes of a delta", _LARGEST_ITEM)
    made = (_lane(plan, transfer, message_bytes) for transfer in plan.transfers if chosen(transfer))
    return [lane for lane in made if len(lane)]


def _lane(plan: Plan, transfer: Transfer, message_bytes: int) -> DeltaLane:
    copies = transfer.copies[transfer.copies[:, SOURCE] != NO_SOURCE]
    limit = min(BLOCK_BYTES, message_bytes)
    cut, elements = cut_boxes(copies, limit), cut_boxes(_elements(plan, transfer.destination, copies), limit)
    nbytes = cut[:, EXTENTS].prod(1) * cut[:, ITEM]
    end = np.cumsum(nbytes)
    firsts = [0]
    while firsts[-1] < len(cut):
        before = int(end[firsts[-1] - 1]) if firsts[-1] else 0
        firsts.append(int(np.searchsorted(end, before + message_bytes, "right")))
    edges = np.concatenate([[0], end])[firsts]
    cut[:, WIRE_OFFSET] = elements[:, WIRE_OFFSET] = end - nbytes - np.repeat(edges[:-1], np.diff(firsts))
    chunks = Chunks(transfer.source, transfer.destination, cut, np.array(firsts, np.int64), tuple(np.diff(edges).tolist()))
    return DeltaLane(transfer.source, transfer.destination, _identity(plan, transfer, message_bytes), chunks, elements)


def _elements(plan: Plan, destination: int, copies: np.ndarray) -> np.ndarray:
    """Return the copies with canonical tensors as their sources."""
    tensors, table = plan.match.sources.tensors, plan.match.side.table(destination)
    place = {name: i for i, name in enumerate(table.names)}
    numbers = np.array([place[name] for name in plan.destinations.get(destination, {})], np.int64)
    queries = np.column_stack([numbers[copies[:, DESTINATION]], copies[:, DESTINATION_OFFSET] // copies[:, ITEM]])
    found = _C.elements_at(table.pieces, np.ascontiguousarray(queries).reshape(-1, 2))
    step = tensor_strides(tensors, found[:, 0])
    rows = copies.copy()
    rows[:, SOURCE] = found[:, 0]
    rows[:, SOURCE_OFFSET] = (found[:, 1 : 1 + MAX_DIMS] * step).sum(1) * rows[:, ITEM]
    rows[:, SOURCE_STRIDES] = step * rows[:, ITEM, None]
    return rows


def _identity(plan: Plan, transfer: Transfer, message_bytes: int) -> int:
    text = f"{FORMAT} {plan.digest} {transfer.check} {transfer.source} {message_bytes}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
