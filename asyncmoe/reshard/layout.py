"""Layouts: the location of every box of every tensor in the ranks' memory.

A *canonical tensor* is a weight in its plain mathematical form (the query projection of layer 3, the gate of expert 17). A rank
holds *storages*, which are contiguous arrays. A *piece* places a box of a canonical tensor at an offset of a storage with given
strides. Fused, interleaved, sharded, replicated and padded storages are all described by several pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from asyncmoe.errors import LayoutError

MAX_DIMS = 4
"""Maximum number of dimensions of a tensor or a storage."""

PADDING = "<padding>"
"""Reserved tensor name for a piece of no tensor: padding is filled with zeros in a destination and never read in a source."""

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Sizes in bytes of the known dtypes, by torch's names without `torch.`."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box in a tensor: `extent[k]` elements from `start[k]` in every dimension k."""

    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements in the box."""
        return prod(self.extent)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{s}:{s + n}" for s, n in zip(self.start, self.extent, strict=False)) + "]"


@dataclass(frozen=True, slots=True)
class Piece:
    """Element i of `box` of `tensor` is element `offset + sum(i[k] * strides[k])` of `storage`. Offset and strides are never negative."""

    tensor: str
    box: Box
    storage: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Storage:
    """A contiguous (row-major) array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements in the array."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return self.size * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The storages of one rank and the pieces in them.

    In a source, a storage may have elements that no piece describes. In a destination, the pieces of a storage (including `PADDING`) must
    cover each of its elements exactly once.
    """

    rank: int
    storages: Mapping[str, Storage]
    pieces: Sequence[Piece]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The layout as blocks, in the order of the storages."""
        if isinstance(self.storages, BlockStorages) and isinstance(self.pieces, BlockPieces) and self.storages.blocks is self.pieces.blocks:
            return self.pieces.blocks
        return (Block(self.storages, tuple(self.pieces)),)

    @property
    def pieces_by_storage(self) -> dict[str, list[Piece]]:
        """The pieces of each storage, in their order."""
        found: dict[str, list[Piece]] = {name: [] for name in self.storages}
        for piece in self.pieces:
            found[piece.storage].append(piece)
        return found

    def at(self, rank: int) -> RankLayout:
        """Return the same layout for another rank. Planning processes all layouts derived this way only once."""
        return replace(self, rank=rank)


@dataclass(frozen=True, eq=False)
class Block:
    """Storages and pieces that occur once under each pair of prefixes, as in a model's layers.

    Attributes:
        storages: by name, without the prefix.
        pieces: with tensors' and storages' names without their prefixes; `PADDING` gets no prefix.
        prefixes: pairs (prefix of tensor names, prefix of storage names).
    """

    storages: Mapping[str, Storage]
    pieces: tuple[Piece, ...]
    prefixes: tuple[tuple[str, str], ...] = (("", ""),)


class _OfBlocks:
    """What blocks hold under full names, built on first access."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks

    @cached_property
    def _all(self) -> Any:
        raise NotImplementedError

    def __getitem__(self, at: Any) -> Any:
        return self._all[at]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


class BlockStorages(_OfBlocks, Mapping[str, Storage]):
    """The storages of blocks."""

    @cached_property
    def _all(self) -> dict[str, Storage]:
        return {front + name: storage for b in self.blocks for _, front in b.prefixes for name, storage in b.storages.items()}


class BlockPieces(_OfBlocks, Sequence[Piece]):
    """The pieces of blocks."""

    @cached_property
    def _all(self) -> tuple[Piece, ...]:
        return tuple(_renamed(p, *prefixes) for block in self.blocks for prefixes in block.prefixes for p in block.pieces)

    def __eq__(self, other: object) -> bool:
        return self._all == tuple(other) if isinstance(other, Sequence) else NotImplemented


def _renamed(piece: Piece, tensor: str, storage: str) -> Piece:
    name = piece.tensor if piece.tensor == PADDING else tensor + piece.tensor
    return Piece(name, piece.box, storage + piece.storage, piece.offset, piece.strides)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def rows(shape: Sequence[int], start: int, count: int) -> Box:
    """Return the box of `count` rows (entries of the first dimension) of a tensor."""
    return Box((start, *(0 for _ in shape[1:])), (count, *shape[1:]))


def columns(shape: Sequence[int], start: int, count: int) -> Box:
    """Return the box of `count` columns (entries of the last dimension) of a tensor."""
    return Box((*(0 for _ in shape[:-1]), start), (*shape[:-1], count))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


@dataclass(slots=True)
class LayoutBuilder:
    """Collects one rank's storages and pieces. A storage has the builder's dtype unless a call names another."""

    rank: int
    dtype: str
    _blocks: list[Block] = field(default_factory=list)
    _storages: dict[str, Storage] = field(default_factory=dict)
    _pieces: list[Piece] = field(default_factory=list)

    def place(self, storage: str, shape: Sequence[int], parts: Iterable[tuple[str, Box, Sequence[int]]], dtype: str | None = None) -> None:
        """Add a storage of `shape`; each part (tensor, box, corner) puts a box with its first element at `corner`.

        The dimensions of the box are aligned with the last dimensions of the storage.

        Raises:
            LayoutError: the storage exists already, or a box does not fit at its corner.
        """
        if storage in self._storages:
            raise LayoutError(f"rank {self.rank}: storage {storage}", got="placed twice", expected="placed once")
        self._pieces += [_piece(storage, tuple(shape), *part) for part in parts]
        self._storages[storage] = Storage(tuple(shape), dtype or self.dtype)

    def stack(self, storage: str, parts: Sequence[tuple[str, Box]], dtype: str | None = None) -> None:
        """Add a storage with the boxes stacked along the first dimension.

        Raises:
            LayoutError: there is no box, boxes differ in a dimension other than the first, or as `place`.
        """
        where, placed, row = f"rank {self.rank}: storage {storage}", [], 0
        rests = {tuple(box.extent[1:]) for _, box in parts}
        if len(rests) != 1:
            got = f"boxes of extents {sorted({tuple(box.extent) for _, box in parts})}"
            raise LayoutError(where, got=got, expected="one or more boxes whose extents differ only in the first dimension")
        (rest,) = rests
        for tensor, box in parts:
            placed.append((tensor, box, (row, *(0 for _ in rest))))
            row += box.extent[0]
        self.place(storage, (row, *rest), placed, dtype)

    def repeat(self, part: RankLayout, prefixes: Sequence[tuple[str, str]]) -> None:
        """Add the storages and pieces of `part` once under each pair of prefixes (of tensors, of storages).

        Raises:
            LayoutError: two storage prefixes are equal.
        """
        fronts = [storage for _, storage in prefixes]
        if len(set(fronts)) < len(fronts):
            raise LayoutError(f"rank {self.rank}: prefixes of storages", got=fronts, expected="all different")
        self._close()
        self._blocks += [replace(block, prefixes=_joined(prefixes, block.prefixes)) for block in part.blocks if prefixes]

    def build(self) -> RankLayout:
        self._close()
        blocks = tuple(self._blocks)
        return RankLayout(self.rank, BlockStorages(blocks), BlockPieces(blocks))

    def _close(self) -> None:
        if self._storages:
            self._blocks.append(Block(self._storages, tuple(self._pieces)))
            self._storages, self._pieces = {}, []


def _piece(storage: str, shape: tuple[int, ...], tensor: str, box: Box, corner: Sequence[int]) -> Piece:
    """Return the piece of a box at a corner of a storage; raise LayoutError if it does not fit there."""
    steps, first = contiguous_strides(shape), len(shape) - len(box.extent)
    ends = zip(corner, (1,) * first + tuple(box.extent), shape, strict=False)
    if first < 0 or len(corner) != len(shape) or any(not 0 <= c <= size - n for c, n, size in ends):
        expected = f"a corner at which the box fits into {shape}"
        raise LayoutError(f"{tensor}{box} in storage {storage}", got=f"corner {tuple(corner)}", expected=expected)
    return Piece(tensor, box, storage, sum(c * s for c, s in zip(corner, steps, strict=True)), steps[first:])


def _joined(outer: Sequence[tuple[str, str]], inner: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((a + c, b + d) for a, b in outer for c, d in inner)
