"""The geometry of a version: which box of which canonical tensor lies where in the objects of which rank, as bytes that are read anywhere.

It is the same for all versions of a run, so it is an object of its own, which manifests name by its digest. The file is a line of JSON
(tensors, counts) and then the arrays of `Slabs`, little-endian and compressed by zlib.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from asyncmoe.errors import AsyncmoeError, DataError
from asyncmoe.reshard.layout import MAX_DIMS, Storage
from asyncmoe.reshard.table import DTYPE, DTYPES, EXTENT, OFFSET, START, STORAGE, STRIDES, TENSOR, Table, Tensors, enumerate_tensors
from asyncmoe.version_store.cells import row_major
from asyncmoe.version_store.slabs import PIECE_COLUMNS, Slabs

FORMAT = 1
MOST_BYTES = 1 << 30
"""Bound of the file, and of its arrays."""
_MOST_PIECES = MOST_BYTES // (8 * PIECE_COLUMNS)


@dataclass(frozen=True, eq=False)
class Geometry:
    """Attributes:
    tensors: the canonical tensors.
    ranks: what each rank writes, in their order.
    """

    tensors: Tensors
    ranks: tuple[Slabs, ...]

    @cached_property
    def slab_rank(self) -> np.ndarray:
        """int64[all slabs]: position in `ranks` of the rank that writes each slab; slabs are numbered through all ranks."""
        return np.repeat(np.arange(len(self.ranks)), [len(one.dtypes) for one in self.ranks])

    @cached_property
    def first_slabs(self) -> np.ndarray:
        """int64[ranks + 1]: number of each rank's first slab."""
        return np.cumsum([0, *(len(one.dtypes) for one in self.ranks)])

    @cached_property
    def table(self) -> Table:
        """The layout of a rank that holds every slab as a storage of its own, named by the slab's number."""
        return table_of(self.tensors, self.ranks)

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        counts = [[len(one.pieces), len(one.dtypes), len(one.objects) - 1] for one in self.ranks]
        tensors = [[name, list(shape)] for name, shape in self.tensors.shapes.items()]
        header = json.dumps({"format": FORMAT, "tensors": tensors, "dtypes": DTYPES, "ranks": counts}, separators=(",", ":"))
        arrays = [part for one in self.ranks for part in (one.pieces, one.firsts, one.dtypes, one.objects)]
        body = np.concatenate([np.zeros(0, np.int64), *(part.reshape(-1) for part in arrays)]).astype("<i8").tobytes()
        return header.encode() + b"\n" + zlib.compress(body, 1)


def table_of(tensors: Tensors, ranks: Sequence[Slabs]) -> Table:
    """Return the slabs of ranks as a layout: a storage for each slab."""
    n = sum(len(one.pieces) for one in ranks)
    pieces = np.zeros((n, 4 + 3 * MAX_DIMS), np.int64)
    storages: list[Storage] = []
    at = 0
    for one in ranks:
        rows = pieces[at : at + len(one.pieces)]
        counts = np.diff(one.firsts)
        rows[:, TENSOR], rows[:, STORAGE] = one.pieces[:, 0], len(storages) + np.repeat(np.arange(len(counts)), counts)
        rows[:, DTYPE] = np.repeat(one.dtypes, counts)
        rows[:, START], rows[:, EXTENT] = one.pieces[:, 1 : 1 + MAX_DIMS], one.pieces[:, 1 + MAX_DIMS :]
        rows[:, STRIDES] = row_major(rows[:, EXTENT])
        elements = np.concatenate([[0], np.cumsum(rows[:, EXTENT].prod(1))])
        rows[:, OFFSET] = elements[:-1] - np.repeat(elements[one.firsts[:-1]], counts)
        sizes = np.diff(elements[one.firsts])
        storages += [Storage((int(size),), DTYPES[kind]) for size, kind in zip(sizes, one.dtypes.tolist(), strict=True)]
        at += len(one.pieces)
    shapes = np.ones((len(storages), MAX_DIMS), np.int64)
    shapes[:, -1] = [one.shape[0] for one in storages]
    return Table(0, tuple(map(str, range(len(storages)))), tuple(storages), shapes, pieces)


def decode(data: bytes, where: str) -> Geometry:
    """Return the geometry in a file. Every size is checked before memory is taken.

    Args:
        where: names the file, for errors.

    Raises:
        DataError: the file is none, or contradicts itself.
    """
    try:
        head, _, packed = data.partition(b"\n")
        header = json.loads(head)
        if header["format"] != FORMAT or tuple(header["dtypes"]) != DTYPES:
            raise ValueError("of another version of asyncmoe")
        shapes = {str(name): tuple(int(n) for n in shape) for name, shape in header["tensors"]}
        tensors = enumerate_tensors(shapes)
        counts = [(int(pieces), int(slabs), int(objects)) for pieces, slabs, objects in header["ranks"]]
        if any(not 0 <= objects <= slabs <= pieces <= _MOST_PIECES for pieces, slabs, objects in counts):
            raise ValueError("impossible counts")
        sizes = [size for pieces, slabs, objects in counts for size in (pieces * PIECE_COLUMNS, slabs + 1, slabs, objects + 1)]
        arrays = _unpacked(packed, sizes)
        ranks = tuple(Slabs(arrays[i].reshape(-1, PIECE_COLUMNS), *arrays[i + 1 : i + 4]) for i in range(0, len(arrays), 4))
        for one in ranks:
            _check(one, tensors)
    except (ValueError, KeyError, TypeError, IndexError, zlib.error, RecursionError, AsyncmoeError) as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(where, got=f"no geometry of a weight version ({why})", expected="the one that was written") from error
    return Geometry(tensors, ranks)


def _unpacked(packed: bytes, sizes: Sequence[int]) -> list[np.ndarray]:
    total = 8 * sum(sizes)
    if total > MOST_BYTES:
        raise ValueError(f"{total} bytes of arrays")
    reader = zlib.decompressobj()
    body = reader.decompress(packed, total + 1)
    if len(body) != total or reader.unconsumed_tail or not reader.eof or reader.unused_data:
        raise ValueError(f"expected {total} bytes of arrays")
    return np.split(np.frombuffer(body, "<i8").astype(np.int64), np.cumsum(sizes)[:-1])


def _check(one: Slabs, tensors: Tensors) -> None:
    """Raise ValueError unless the arrays fit each other and the tensors."""
    number, start, extent = one.pieces[:, 0], one.pieces[:, 1 : 1 + MAX_DIMS], one.pieces[:, 1 + MAX_DIMS :]
    if ((number < 0) | (number >= len(tensors.shapes))).any():
        raise ValueError("a tensor that is not listed")
    if (start < 0).any() or (extent < 1).any() or (start > tensors.extent[number] - extent).any():
        raise ValueError("a box outside its tensor")
    if ((one.dtypes < 0) | (one.dtypes >= len(DTYPES))).any():
        raise ValueError("an unknown dtype")
    for firsts, end in ((one.firsts, len(one.pieces)), (one.objects, len(one.dtypes))):
        if firsts[0] != 0 or firsts[-1] != end or (np.diff(firsts) < 1).any():
            raise ValueError("slabs or objects that do not follow each other")
