"""Maps the elements of an exchange's messages to elements of canonical tensors, and defines the canonical digest of shards.

The canonical digest is a sum over a shard's elements that depends neither on how tensors are cut and placed nor on the order of the terms
(csrc/element_digest.h). The term of an element is mix(seed + (index + 1) * 0x9e3779b97f4a7c15 + bits) modulo 2^64: `seed` belongs to the
canonical tensor, `index` is the element's row-major number in the whole tensor, `bits` are the stored bits, zero-extended, and mix is
splitmix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). Changing an element removes one term and
adds another. Padding has no terms. The digest detects damage; it is not a cryptographic hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.chunks import Chunks, cut_transfer, cuts_of
from asyncmoe.reshard.layout import MAX_DIMS
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
        source, destination: ranks.
        chunks: its messages, as the exchange cuts them.
        elements: as `chunks.copies`, but the source columns describe the canonical tensor: its number, and offset and strides in it, in
            elements multiplied by ITEM.
        table: maps the elements to canonical tensors and to their locations at the destination.
    """

    source: int
    destination: int
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
            table = _table(elements, chunks.firsts, seeds)
            lanes.append(DeltaLane(transfer.source, transfer.destination, chunks, elements, table))
        elif (transfer.copies[:, SOURCE] != NO_SOURCE).any():
            got = f"elements that rank {transfer.source} copies from itself"
            raise LayoutError("plan of an exchange of deltas", got=got, expected="messages between ranks only")
    return lanes


def seed_of(name: str) -> int:
    """Return the 64-bit seed of a tensor: BLAKE2b of its name in UTF-8, little-endian; the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, person=b"asyncmoe tensor").digest(), "little")


def _elements(tensors: Tensors, copies: np.ndarray) -> np.ndarray:
    """Return copies (`Transfer.copies`) with the canonical tensors as row-major sources."""
    extent = tensors.extent[copies[:, TENSOR]]
    step: np.ndarray = np.ones_like(extent)
    for k in range(MAX_DIMS - 2, -1, -1):
        step[:, k] = step[:, k + 1] * extent[:, k + 1]
    rows = copies.copy()
    rows[:, SOURCE] = rows[:, TENSOR]
    rows[:, SOURCE_OFFSET] = (rows[:, START] * step).sum(1) * rows[:, ITEM]
    rows[:, SOURCE_STRIDES] = step * rows[:, ITEM, None]
    return rows


def _table(rows: np.ndarray, firsts: np.ndarray, seeds: np.ndarray) -> _C.DeltaTable:
    columns = [rows[:, k] for k in (SOURCE, SOURCE_OFFSET, DESTINATION, DESTINATION_OFFSET, ITEM)]
    boxes = [rows[:, k] for k in (EXTENTS, SOURCE_STRIDES, DESTINATION_STRIDES)]
    return _C.DeltaTable(np.ascontiguousarray(np.column_stack([*columns, *boxes])), firsts, seeds)


def _columns(part: slice) -> range:
    return range(part.start, part.stop)
