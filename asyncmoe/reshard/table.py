"""The pieces of many ranks as columns, so that planning is arithmetic on arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncmoe.errors import LayoutError
from asyncmoe.reshard.layout import ITEM_BYTES, MAX_DIMS, PADDING, Box, Piece, RankLayout, Storage

DTYPES = tuple(ITEM_BYTES)
NO_TENSOR = -1


@dataclass(frozen=True, eq=False)
class Tensors:
    """The canonical tensors of a plan, numbered.

    Attributes:
        shapes: by name.
        names: by number; the last one, `NO_TENSOR`, is padding.
        number: of a name.
        extent: int64[tensors, MAX_DIMS].
    """

    shapes: Mapping[str, tuple[int, ...]]
    names: tuple[str, ...]
    number: Mapping[str, int]
    extent: np.ndarray


def enumerate_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Number tensors in their order.

    Raises:
        LayoutError: a tensor of more than `MAX_DIMS` dimensions, or one with the reserved name of padding.
    """
    if PADDING in shapes:
        raise LayoutError("tensors", got=f"one named {PADDING}", expected="another name, this one is reserved")
    number = {name: i for i, name in enumerate(shapes)}
    number[PADDING] = NO_TENSOR
    return Tensors(shapes, (*shapes, PADDING), number, _padded(list(shapes.values()), 1))


@dataclass(frozen=True, eq=False)
class Table:
    """One row a piece, n in all, in the order of the layouts. Boxes are padded in front to `MAX_DIMS` dimensions of extent 1.

    Attributes:
        storages: (rank, name, storage) of every storage; column `storage` is a position in it.
        rank, storage, tensor, offset: int64[n]; `tensor` is a position in the tensors planned for, `NO_TENSOR` for padding.
        start, extent, strides: int64[n, MAX_DIMS]; offset and strides in elements.
        dtype: int64[n]; a position in `DTYPES`.
    """

    storages: tuple[tuple[int, str, Storage], ...]
    rank: np.ndarray
    storage: np.ndarray
    tensor: np.ndarray
    start: np.ndarray
    extent: np.ndarray
    offset: np.ndarray
    strides: np.ndarray
    dtype: np.ndarray

    def describe(self, row: int, tensors: Tensors) -> str:
        """Rank, tensor, box and storage of a row, for an error."""
        rank, storage, _ = self.storages[self.storage[row]]
        name = tensors.names[self.tensor[row]]
        first = MAX_DIMS - len(tensors.shapes.get(name, (0,) * MAX_DIMS))
        box = Box(tuple(self.start[row, first:].tolist()), tuple(self.extent[row, first:].tolist()))
        return f"rank {rank}: tensor {name} box {box} in storage {storage}"


def tabulate(tensors: Tensors, layouts: Sequence[RankLayout]) -> Table:
    """Put layouts into columns.

    Raises:
        LayoutError: a rank twice, an unknown tensor, storage or dtype, a box outside its tensor or its storage.
    """
    ranks = [layout.rank for layout in layouts]
    for rank in ranks:
        if ranks.count(rank) > 1:
            raise LayoutError(f"rank {rank}", got=f"{ranks.count(rank)} layouts", expected="1")
    number = tensors.number
    storages: list[tuple[int, str, Storage]] = []
    pieces: list[Piece] = []
    storage_of: list[int] = []
    for layout in layouts:
        place = {name: len(storages) + i for i, name in enumerate(layout.storages)}
        storages += [(layout.rank, name, storage) for name, storage in layout.storages.items()]
        for piece in layout.pieces:
            if piece.tensor not in number or piece.storage not in place:
                raise _unknown(piece, layout.rank, piece.tensor not in number)
            dims = len(piece.box.extent)
            if not dims == len(piece.box.start) == len(piece.strides) == len(tensors.shapes.get(piece.tensor, piece.box.extent)):
                raise _ragged(piece, layout.rank, tensors.shapes)
        pieces += layout.pieces
        storage_of += [place[piece.storage] for piece in layout.pieces]
    for rank, name, storage in storages:
        if storage.dtype not in ITEM_BYTES or len(storage.shape) > MAX_DIMS:
            what = f"rank {rank}: storage {name}"
            raise LayoutError(what, got=f"{storage.dtype}{storage.shape}", expected=f"at most {MAX_DIMS} dimensions of {', '.join(DTYPES)}")
    table = _columns(number, storages, storage_of, pieces)
    _check_bounds(tensors, table)
    return table


def _columns(number: Mapping[str, int], storages: list[tuple[int, str, Storage]], storage_of: list[int], pieces: list[Piece]) -> Table:
    storage = np.array(storage_of, np.int64).reshape(-1)
    ranks = np.array([rank for rank, _, _ in storages], np.int64)
    dtypes = np.array([DTYPES.index(s.dtype) for _, _, s in storages], np.int64)
    return Table(
        storages=tuple(storages),
        rank=ranks[storage] if len(storages) else storage,
        storage=storage,
        tensor=np.array([number[p.tensor] for p in pieces], np.int64),
        start=_padded([p.box.start for p in pieces], 0),
        extent=_padded([p.box.extent for p in pieces], 1),
        offset=np.array([p.offset for p in pieces], np.int64),
        strides=_padded([p.strides for p in pieces], 0),
        dtype=dtypes[storage] if len(storages) else storage,
    )


def _padded(rows: list[tuple[int, ...]], fill: int) -> np.ndarray:
    """int64[n, MAX_DIMS] of tuples, filled in front."""
    fronts = [(fill,) * n for n in range(MAX_DIMS, -1, -1)]
    try:
        return np.array([fronts[len(row)] + row for row in rows], np.int64).reshape(-1, MAX_DIMS)
    except IndexError:
        longest = max(rows, key=len)
        raise LayoutError(f"box of {len(longest)} dimensions", got=longest, expected=f"at most {MAX_DIMS}") from None


def _check_bounds(tensors: Tensors, table: Table) -> None:
    inside = (table.start >= 0).all(1) & (table.extent >= 1).all(1)
    if len(tensors.extent):
        inside &= ((table.start + table.extent <= tensors.extent[table.tensor]) | (table.tensor == NO_TENSOR)[:, None]).all(1)
    sizes = np.array([storage.size for _, _, storage in table.storages], np.int64)
    last = table.offset + ((table.extent - 1) * table.strides).sum(1)
    stored = (table.offset >= 0) & (table.strides >= 0).all(1)
    if len(sizes):
        stored &= last < sizes[table.storage]
    for good, expected in ((inside, "a box within the tensor"), (stored, "a place within the storage")):
        if not good.all():
            row = int(np.flatnonzero(~good)[0])
            name = tensors.names[table.tensor[row]]
            _, _, storage = table.storages[table.storage[row]]
            place = f"offset {table.offset[row]}, strides {table.strides[row].tolist()}"
            got = f"tensor {tensors.shapes.get(name, ())}, storage {storage.shape}, {place}"
            raise LayoutError(table.describe(row, tensors), got=got, expected=expected)


def _unknown(piece: Piece, rank: int, tensor: bool) -> LayoutError:
    what = f"rank {rank}: tensor {piece.tensor} box {piece.box} in storage {piece.storage}"
    return LayoutError(
        what, got="an unknown " + ("tensor" if tensor else "storage"), expected="a tensor of the plan and a storage of the rank"
    )


def _ragged(piece: Piece, rank: int, tensors: Mapping[str, tuple[int, ...]]) -> LayoutError:
    what = f"rank {rank}: tensor {piece.tensor} box {piece.box.start}+{piece.box.extent} in storage {piece.storage}"
    got = f"{len(piece.box.start)} starts, {len(piece.box.extent)} extents, {len(piece.strides)} strides"
    return LayoutError(what, got=got, expected=f"as many of each as {tensors.get(piece.tensor, '')} has dimensions")
