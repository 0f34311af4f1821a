"""The canonical digest of a rank's shard: a sum over its elements that does not depend on how tensors are cut and placed.

The term of an element is mix(seed + (index + 1) * 0x9e3779b97f4a7c15 + bits) modulo 2^64: `seed` belongs to the canonical tensor, `index`
is the element's row-major number in the whole tensor, `bits` are the stored bits, zero-extended, and mix is splitmix64's finalizer (Steele,
Lea, Flood: Fast splittable pseudorandom number generators, 2014). The sum can be computed in any order and in parts by those who hold the
parts, and a change of an element takes out one term and adds another. Every stored element counts: one that a rank stores twice counts
twice. An element of padding is an element of a tensor of its storage, at its place in the storage. The digest detects damage; it is no
cryptographic hash. `shard_digest` reads host memory; `DeltaReceiver.adopt` reads a GPU's, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.chunks import cut_boxes
from asyncmoe.reshard.layout import MAX_DIMS, PADDING, RankLayout, Storage
from asyncmoe.reshard.memory import Array, addresses_of, check_apart, device_of, memories_of
from asyncmoe.reshard.plan import (
    COLUMNS,
    DESTINATION,
    DESTINATION_OFFSET,
    DESTINATION_STRIDES,
    EXTENTS,
    ITEM,
    SOURCE,
    SOURCE_OFFSET,
    SOURCE_STRIDES,
    Plan,
)
from asyncmoe.reshard.table import (
    DTYPE,
    DTYPE_BYTES,
    EXTENT,
    NO_TENSOR,
    OFFSET,
    START,
    STORAGE,
    STRIDES,
    TENSOR,
    Table,
    Tensors,
    enumerate_tensors,
    tabulate,
)

WORD = (1 << 64) - 1
BLOCK_BYTES = _C.DELTA_BLOCK_BYTES
"""Boxes are cut into parts of at most so many bytes, the most that the C++ code takes as one row."""


def seed_of(name: str) -> int:
    """Return the 64-bit seed of a tensor: BLAKE2b of its name in UTF-8, little-endian; the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, person=b"asyncmoe tensor").digest(), "little")


def shard_digest(tensors: Mapping[str, tuple[int, ...]], layout: RankLayout, arrays: Mapping[str, Array], *, threads: int = 0) -> int:
    """Return the canonical digest of a rank's shard, read from its arrays.

    Args:
        tensors: canonical tensors and their shapes, at least those in the layout.
        arrays: by storage name, in host memory.

    Raises:
        LayoutError: the layout is inconsistent; an array is missing, does not match its storage, or is not in host memory.
    """
    numbered = enumerate_tensors(tensors)
    table = tabulate(numbered, [layout]).tables[0]
    bases, device = addresses(dict(zip(table.names, table.storages, strict=True)), arrays, f"rank {layout.rank}: array", write=False)
    if device != "cpu":
        raise LayoutError(f"rank {layout.rank}: arrays to digest", got=device, expected="host memory: only `DeltaReceiver` reads a GPU's")
    rows = piece_copies(numbered, table, np.ones(len(table.pieces), bool))
    return element_table(rows, one_chunk(rows), seeds(numbered, table.names)).read(0, bases, threads)


def expected_digest(plan: Plan, destination: int, contributions: Iterable[int]) -> int:
    """Return the canonical digest that a destination rank must have.

    Args:
        contributions: of every rank that sends to it (and its own, if it copies from itself): `DeltaSender.contribution`.

    Raises:
        LayoutError: the rank is no destination of the plan.
    """
    table = table_of(plan, destination)
    empty = np.zeros(len(table.names), np.int64)
    return (padding_table(plan, destination, table.names).read(0, empty, 1) + sum(contributions)) & WORD


def table_of(plan: Plan, destination: int) -> Table:
    """Return the pieces of a destination rank; raise LayoutError if the plan has no such destination."""
    ranks = plan.match.side.ranks
    if destination not in ranks:
        raise LayoutError("rank of a destination of deltas", got=destination, expected=f"one of the {len(ranks)} of the plan")
    return plan.match.side.table(destination)


def padding_table(plan: Plan, destination: int, storages: Iterable[str]) -> _C.DeltaTable:
    """Return the padding of a destination rank as one chunk; `storages` are the names of the bases."""
    tensors, table = plan.match.sources.tensors, table_of(plan, destination)
    rows = piece_copies(tensors, table, table.pieces[:, TENSOR] == NO_TENSOR)
    place = {name: i for i, name in enumerate(storages)}
    rows[:, DESTINATION] = [place[table.names[i]] for i in rows[:, DESTINATION].tolist()]
    return element_table(rows, one_chunk(rows), seeds(tensors, table.names))


def seeds(tensors: Tensors, storages: Iterable[str]) -> np.ndarray:
    """Return int64[tensors + storages]: the seeds of tensors by number, then those of the storages' padding."""
    names = [*tensors.names[:-1], *(PADDING + name for name in storages)]
    return np.array([seed_of(name) for name in names], np.uint64).view(np.int64)


def piece_copies(tensors: Tensors, table: Table, chosen: np.ndarray) -> np.ndarray:
    """Return pieces of a layout as copies (`Transfer.copies`), cut: from the numbers of their elements in their tensors (offsets and
    strides times the item's bytes) to their storages (by position in the table). Sources are numbered as `seeds`."""
    pieces = table.pieces[chosen]
    padding = pieces[:, TENSOR] == NO_TENSOR
    copies = np.zeros((len(pieces), COLUMNS), np.int64)
    item = DTYPE_BYTES[pieces[:, DTYPE]]
    step = tensor_strides(tensors, pieces[:, TENSOR])
    index = (pieces[:, START] * step).sum(1)
    copies[:, SOURCE] = np.where(padding, len(tensors.shapes) + pieces[:, STORAGE], pieces[:, TENSOR])
    copies[:, SOURCE_OFFSET] = np.where(padding, pieces[:, OFFSET], index) * item
    copies[:, SOURCE_STRIDES] = np.where(padding[:, None], pieces[:, STRIDES], step) * item[:, None]
    copies[:, DESTINATION], copies[:, DESTINATION_OFFSET] = pieces[:, STORAGE], pieces[:, OFFSET] * item
    copies[:, DESTINATION_STRIDES] = pieces[:, STRIDES] * item[:, None]
    copies[:, ITEM], copies[:, EXTENTS] = item, pieces[:, EXTENT]
    return cut_boxes(copies, BLOCK_BYTES)


def tensor_strides(tensors: Tensors, numbers: np.ndarray) -> np.ndarray:
    """Return int64[n, MAX_DIMS]: row-major strides of tensors in elements; zeros for padding."""
    extent = np.concatenate([tensors.extent, np.zeros((1, MAX_DIMS), np.int64)])[numbers]
    strides: np.ndarray = np.ones_like(extent)
    for k in range(MAX_DIMS - 2, -1, -1):
        strides[:, k] = strides[:, k + 1] * extent[:, k + 1]
    strides[numbers == NO_TENSOR] = 0
    return strides


def element_table(copies: np.ndarray, firsts: np.ndarray, seed: np.ndarray) -> _C.DeltaTable:
    """Return the table of csrc/delta.h for copies from tensors to places."""
    columns = [copies[:, k] for k in (SOURCE, SOURCE_OFFSET, DESTINATION, DESTINATION_OFFSET, ITEM)]
    boxes = [copies[:, k] for k in (EXTENTS, SOURCE_STRIDES, DESTINATION_STRIDES)]
    return _C.DeltaTable(np.ascontiguousarray(np.column_stack([*columns, *boxes])), firsts, seed)


def one_chunk(copies: np.ndarray) -> np.ndarray:
    return np.array([0, len(copies)], np.int64)


def addresses(storages: Mapping[str, Storage], arrays: Mapping[str, Array], what: str, *, write: bool) -> tuple[np.ndarray, str]:
    """Return int64[storages]: addresses of the arrays of storages; and the device of all of them, "cpu" or "cuda:0".

    Raises:
        LayoutError: an array is missing or does not match its storage, is written and shares memory, or not all are on one device.
    """
    found = memories_of(storages, arrays, what, write=write)
    check_apart({}, found if write else {})
    return addresses_of(found.values()), device_of(found.values(), f"{what}s of a delta")
