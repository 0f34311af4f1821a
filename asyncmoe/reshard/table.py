"""Tables of the ranks' pieces as array columns, so that planning is array arithmetic. Equal layouts share one table."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard.layout import ITEM_BYTES, MAX_DIMS, PADDING, Block, Box, Piece, RankLayout, Storage

DTYPES = tuple(ITEM_BYTES)
DTYPE_BYTES = np.array([ITEM_BYTES[name] for name in DTYPES], np.int64)
NO_TENSOR = -1
_UNKNOWN = -2
_MOST = 1 << 62
TENSOR, STORAGE, DTYPE, OFFSET = range(4)
START = slice(4, 4 + MAX_DIMS)
EXTENT = slice(4 + MAX_DIMS, 4 + 2 * MAX_DIMS)
STRIDES = slice(4 + 2 * MAX_DIMS, 4 + 3 * MAX_DIMS)


@dataclass(frozen=True, eq=False)
class Tensors:
    """The canonical tensors of a plan, numbered.

    Attributes:
        shapes: shapes by name.
        names: names by number; the last one (number `NO_TENSOR`) is padding.
        number: numbers by name.
        extent: int64[tensors, MAX_DIMS]; the shapes, padded in front with 1.
        dims: int64[tensors]; the number of dimensions.
    """

    shapes: Mapping[str, tuple[int, ...]]
    names: tuple[str, ...]
    number: Mapping[str, int]
    extent: np.ndarray
    dims: np.ndarray


def enumerate_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Number tensors in the given order.

    Raises:
        LayoutError: a tensor has more than `MAX_DIMS` dimensions, invalid sizes, or padding's reserved name.
    """
    for name, shape in shapes.items():
        if not _is_shape(shape):
            raise LayoutError(f"tensor {name}", got=f"shape {shape}", expected=f"at most {MAX_DIMS} sizes, each at least 0")
    if PADDING in shapes:
        raise LayoutError("tensors", got=f"one named {PADDING}", expected="another name: this one is reserved")
    number = {name: i for i, name in enumerate(shapes)}
    number[PADDING] = NO_TENSOR
    dims = np.array([len(shape) for shape in shapes.values()], np.int64)
    return Tensors(shapes, (*shapes, PADDING), number, _padded(list(shapes.values()), 1), dims)


@dataclass(frozen=True, eq=False)
class Table:
    """One distinct layout: n pieces in s storages.

    Attributes:
        rank: the lowest rank with this layout, for errors.
        names, storages: name and description of each storage.
        shapes: int64[s, MAX_DIMS]; shapes of the storages, padded in front with 1.
        pieces: int64[n, 4 + 3 * MAX_DIMS], in the column order of csrc/pieces.h. TENSOR is the number of a tensor (`NO_TENSOR`: padding),
            STORAGE an index into `storages`, DTYPE an index into `DTYPES`; offset and strides are in elements; boxes are padded in front to
            `MAX_DIMS` dimensions with extent 1.
    """

    rank: int
    names: tuple[str, ...]
    storages: tuple[Storage, ...]
    shapes: np.ndarray
    pieces: np.ndarray

    def describe(self, row: int, tensors: Tensors) -> str:
        """Describe rank, tensor, box and storage of a row, for an error."""
        piece = self.pieces[row]
        name = tensors.names[piece[TENSOR]]
        first = MAX_DIMS - len(tensors.shapes.get(name, (0,) * MAX_DIMS))
        box = Box(tuple(piece[START][first:].tolist()), tuple(piece[EXTENT][first:].tolist()))
        return f"rank {self.rank}: tensor {name} box {box} in storage {self.names[piece[STORAGE]]}"


@dataclass(frozen=True, eq=False)
class Side:
    """The sources or the destinations of a plan.

    Attributes:
        tables: the distinct layouts, ordered by their lowest rank.
        ranks: int64[r], ascending.
        table_of: int64[r]; the index of each rank's table.
    """

    tables: tuple[Table, ...]
    ranks: np.ndarray
    table_of: np.ndarray

    def table(self, rank: int) -> Table:
        """Return the table of a rank on this side."""
        return self.tables[int(self.table_of[np.searchsorted(self.ranks, rank)])]

    def update(self, state: hashlib._Hash) -> None:
        """Feed all tables, ranks and their assignment into a hash."""
        state.update(np.concatenate([[len(self.tables)], self.ranks, self.table_of]).astype("<i8").tobytes())
        for table in self.tables:
            state.update("\0".join(table.names).encode())
            state.update(repr((_digest(table.pieces), _digest(table.shapes))).encode())


def tabulate(tensors: Tensors, layouts: Iterable[RankLayout]) -> Side:
    """Convert layouts to tables.

    Raises:
        LayoutError: a duplicate or negative rank, an unknown tensor, storage or dtype, or a box outside its tensor or its storage.
        TypeError: an offset, a stride or an edge of a box is not a 64-bit integer.
    """
    ordered = sorted(layouts, key=lambda layout: layout.rank)
    if ordered and ordered[0].rank < 0:
        raise LayoutError("rank of a layout", got=ordered[0].rank, expected="at least 0")
    for rank, count in Counter(layout.rank for layout in ordered).items():
        if count > 1:
            raise LayoutError(f"rank {rank}", got=f"{count} layouts", expected="1")
    reader = _Reader(tensors)
    numbers = [reader.read(layout) for layout in ordered]
    return Side(tuple(reader.tables), np.array([layout.rank for layout in ordered], np.int64), np.array(numbers, np.int64))


class _Reader:
    """Creates one table for each distinct layout. Layouts are compared by identity first, which is cheap, then by content."""

    def __init__(self, tensors: Tensors) -> None:
        self.tables: list[Table] = []
        self._tensors = tensors
        self._by_identity: dict[tuple[int, int], int] = {}
        self._by_content: dict[tuple[object, ...], int] = {}
        self._numbers: dict[tuple[tuple[str, ...], tuple[str, ...]], np.ndarray] = {}

    def read(self, layout: RankLayout) -> int:
        """Return the index of the layout's table. Layouts must outlive the reader."""
        identity = (id(layout.storages), id(layout.pieces))
        if identity not in self._by_identity:
            table = self._table(layout)
            content = (_digest(table.pieces), _digest(table.shapes), table.names)
            if content not in self._by_content:
                self._by_content[content] = len(self.tables)
                self.tables.append(table)
            self._by_identity[identity] = self._by_content[content]
        return self._by_identity[identity]

    def _table(self, layout: RankLayout) -> Table:
        names: list[str] = []
        storages: list[Storage] = []
        parts = [np.empty((0, _C.PIECE_COLUMNS), np.int64)]
        for block in layout.blocks:
            parts.append(self._rows(block, layout.rank, len(storages)))
            for _, front in block.prefixes:
                names += [front + name for name in block.storages]
                storages += block.storages.values()
        if len(set(names)) < len(names):
            raise LayoutError(f"rank {layout.rank}: storages", got="one name for two of them", expected="different names")
        shapes = _padded([storage.shape for storage in storages], 1)
        table = Table(layout.rank, tuple(names), tuple(storages), shapes, np.concatenate(parts))
        _check_bounds(self._tensors, table)
        return table

    def _rows(self, block: Block, rank: int, first: int) -> np.ndarray:
        """Return the rows of a block whose first storage has number `first` in its rank."""
        _check_storages(block, rank)
        tensor = self._tensor_numbers(block)
        _check_pieces(self._tensors, block, tensor, rank)
        place = {name: i for i, name in enumerate(block.storages)}
        dtypes = np.array([DTYPES.index(storage.dtype) for storage in block.storages.values()], np.int64)
        pieces = block.pieces
        rows = np.empty((len(block.prefixes), len(pieces), _C.PIECE_COLUMNS), np.int64)
        storage = np.array([place[p.storage] for p in pieces], np.int64)
        rows[:, :, STORAGE] = storage + first + np.arange(len(block.prefixes))[:, None] * len(place)
        rows[:, :, DTYPE] = dtypes[storage] if len(storage) else storage
        rows[:, :, OFFSET] = _integers([p.offset for p in pieces])
        rows[:, :, START] = _padded([p.box.start for p in pieces], 0)
        rows[:, :, EXTENT] = _padded([p.box.extent for p in pieces], 1)
        rows[:, :, STRIDES] = _padded([p.strides for p in pieces], 0)
        rows[:, :, TENSOR] = tensor
        return rows.reshape(-1, _C.PIECE_COLUMNS)

    def _tensor_numbers(self, block: Block) -> np.ndarray:
        """Return int64[prefixes, pieces] of tensor numbers, or `_UNKNOWN`. Blocks with equal names, as on tensor-parallel ranks, share
        the lookup."""
        ends = tuple(p.tensor for p in block.pieces)
        fronts = tuple(front for front, _ in block.prefixes)
        if (fronts, ends) not in self._numbers:
            number = self._tensors.number
            found = [[NO_TENSOR if end == PADDING else number.get(front + end, _UNKNOWN) for end in ends] for front in fronts]
            self._numbers[fronts, ends] = np.array(found, np.int64).reshape(len(fronts), len(ends))
        return self._numbers[fronts, ends]


def _check_storages(block: Block, rank: int) -> None:
    for name, storage in block.storages.items():
        if storage.dtype not in ITEM_BYTES or not _is_shape(storage.shape):
            what = f"rank {rank}: storage {block.prefixes[0][1]}{name}"
            expected = f"at most {MAX_DIMS} sizes, each at least 0, and a dtype among {', '.join(DTYPES)}"
            raise LayoutError(what, got=f"{storage.dtype}{storage.shape}", expected=expected)
    for piece in block.pieces:
        if piece.storage not in block.storages:
            raise _wrong(piece, rank, "an unknown storage", "a storage of the rank")


def _check_pieces(tensors: Tensors, block: Block, number: np.ndarray, rank: int) -> None:
    """Reject unknown tensors, and pieces that do not have as many dimensions as their tensor (padding may have any number)."""
    if (number == _UNKNOWN).any():
        raise _wrong(block.pieces[int(np.argwhere(number == _UNKNOWN)[0][1])], rank, "an unknown tensor", "a tensor of the plan")
    dims = np.array([len(p.box.extent) for p in block.pieces], np.int64)
    ragged = (number != NO_TENSOR) & (np.append(tensors.dims, 0)[number] != dims)
    ragged |= np.array([not len(p.box.extent) == len(p.box.start) == len(p.strides) for p in block.pieces], bool)
    if ragged.any():
        piece = block.pieces[int(np.argwhere(ragged)[0][1])]
        got = f"{len(piece.box.start)} starts, {len(piece.box.extent)} extents, {len(piece.strides)} strides"
        raise _wrong(piece, rank, got, "as many of each as the tensor has dimensions")


def _padded(rows: list[tuple[int, ...]], fill: int) -> np.ndarray:
    """Return tuples as int64[n, MAX_DIMS], padded in front with `fill`."""
    fronts = [(fill,) * n for n in range(MAX_DIMS, -1, -1)]
    try:
        return _integers([fronts[len(row)] + tuple(row) for row in rows]).reshape(-1, MAX_DIMS)
    except IndexError:
        longest = max(rows, key=len)
        raise LayoutError(f"box of {len(longest)} dimensions", got=longest, expected=f"at most {MAX_DIMS} dimensions") from None


def _integers(values: list[int] | list[tuple[int, ...]]) -> np.ndarray:
    """Return values as int64; raise TypeError for non-integers, which NumPy would round."""
    made = np.array(values)
    if made.size and made.dtype.kind != "i":
        raise TypeError(made.dtype)
    return made.astype(np.int64, copy=False)


def _is_shape(shape: tuple[int, ...]) -> bool:
    return len(shape) <= MAX_DIMS and all(n >= 0 for n in shape) and prod(max(1, n) for n in shape) < _MOST


def _check_bounds(tensors: Tensors, table: Table) -> None:
    bad = _C.find_bad_row(table.pieces, tensors.extent, table.shapes.prod(1))
    if bad is None:
        return
    row, outside_storage = bad
    piece = table.pieces[row]
    name, storage = tensors.names[piece[TENSOR]], table.storages[piece[STORAGE]]
    place = f"offset {piece[OFFSET]}, strides {piece[STRIDES].tolist()}"
    raise LayoutError(
        table.describe(row, tensors),
        got=f"tensor {tensors.shapes.get(name, ())}, storage {storage.shape}, {place}",
        expected="a place within the storage" if outside_storage else "a box of at least one element, within the tensor",
    )


def _digest(array: np.ndarray) -> int:
    return _C.digest(array.ctypes.data, array.nbytes, 1)


def _wrong(piece: Piece, rank: int, got: str, expected: str) -> LayoutError:
    where = f"rank {rank}: tensor {piece.tensor} box {piece.box.start}+{piece.box.extent} in storage {piece.storage}"
    return LayoutError(where, got=got, expected=expected)
