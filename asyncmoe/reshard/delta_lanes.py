"""Maps the elements of an exchange's messages to elements of canonical tensors, so that shards can be digested by element
(`asyncmoe.reshard.element_digest`). Padding has no terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.chunks import Chunks, cut_transfer, cuts_of, row_major_strides
from asyncmoe.reshard.element_digest import seed_of
from asyncmoe.reshard.plan import (
    CAST,
    DESTINATION,
    DESTINATION_OFFSET,
    DESTINATION_STRIDES,
    EXTENTS,
    ITEM,
    NO_SOURCE,
    SOURCE,
    SOURCE_OFFSET,
    SOURCE_STRIDES,
    START,
    TENSOR,
    WIRE_OFFSET,
    Plan,
    Transfer,
)
from asyncmoe.reshard.table import Tensors

WORD = (1 << 64) - 1
BLOCK_BYTES: int = _C.DELTA_BLOCK_BYTES
"""Maximum bytes of the parts into which boxes are cut in an exchange with deltas; the C++ code compares at most this much at a time."""


@dataclass(frozen=True, eq=False)
class DeltaLane:
    """A transfer in an exchange.

    Attributes:
        chunks: its messages, as the exchange cuts them.
        elements: as `chunks.copies`, but the source columns describe the canonical tensor: its number, and offset and strides in it, in
            elements multiplied by ITEM.
        table: maps the elements to canonical tensors and to their locations at the destination.
    """

    chunks: Chunks
    elements: np.ndarray
    table: _C.DeltaTable

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def element_count(self) -> int:
        return int(self.elements[:, EXTENTS].prod(1).sum())

    def sends_like(self, other: DeltaLane) -> bool:
        """Return whether both lanes send the same messages from the same source: their destinations have equal layouts."""
        if self.chunks.copies.shape != other.chunks.copies.shape or self.chunks.nbytes != other.chunks.nbytes:
            return False
        read = [SOURCE, SOURCE_OFFSET, WIRE_OFFSET, ITEM, CAST, *_columns(EXTENTS), *_columns(SOURCE_STRIDES)]
        pairs = ((self.chunks.copies, other.chunks.copies), (self.elements, other.elements))
        return all(np.array_equal(mine[:, read], theirs[:, read]) for mine, theirs in pairs)


def lanes_of(plan: Plan, chosen: Callable[[Transfer], bool], bucket_bytes: int) -> list[DeltaLane]:
    """Return the lanes of selected transfers of a plan, cut as in an `Exchanger` with `delta` and this `bucket_bytes`.

    Raises:
        LayoutError: as `cut_transfer`; or a rank copies elements from itself, which is no message.
    """
    seeds = np.array([seed_of(name) for name in plan.match.sources.tensors.names[:-1]], np.uint64).view(np.int64)
    cuts, lanes = cuts_of(plan, bucket_bytes), []
    for transfer in filter(chosen, plan.transfers):
        if transfer.source != transfer.destination:
            cut = cuts[transfer.source, transfer.destination]
            copies = _elements(plan.match.sources.tensors, transfer.copies)
            chunks = cut_transfer(plan, transfer, *cut, most=BLOCK_BYTES)
            elements = cut_transfer(plan, replace(transfer, copies=copies), *cut, most=BLOCK_BYTES).copies
            lanes.append(DeltaLane(chunks, elements, _table(elements, chunks.firsts, seeds)))
        elif (transfer.copies[:, SOURCE] != NO_SOURCE).any():
            got = f"elements that rank {transfer.source} copies from itself"
            raise LayoutError("plan of an exchange of deltas", got=got, expected="messages between ranks only")
    return lanes


def _elements(tensors: Tensors, copies: np.ndarray) -> np.ndarray:
    """Return copies (`Transfer.copies`) with the canonical tensors as row-major sources."""
    rows = copies.copy()
    rows[:, SOURCE] = rows[:, TENSOR]
    rows[:, SOURCE_STRIDES] = row_major_strides(tensors.extent[rows[:, TENSOR]], rows[:, ITEM])
    rows[:, SOURCE_OFFSET] = (rows[:, START] * rows[:, SOURCE_STRIDES]).sum(1)
    return rows


def _table(rows: np.ndarray, firsts: np.ndarray, seeds: np.ndarray) -> _C.DeltaTable:
    columns = [rows[:, k] for k in (SOURCE, SOURCE_OFFSET, DESTINATION, DESTINATION_OFFSET, ITEM)]
    boxes = [rows[:, k] for k in (EXTENTS, SOURCE_STRIDES, DESTINATION_STRIDES)]
    return _C.DeltaTable(np.ascontiguousarray(np.column_stack([*columns, *boxes])), firsts, seeds)


def _columns(part: slice) -> range:
    return range(part.start, part.stop)
