"""The pieces of a trajectory as a store keeps them: a head, its arrays, the routes of each layer, its masks. Pure.

The head is sealed with the name of the group and the key of the trajectory, so that no other one's passes for it, and has length and
checksum (CRC-32C) of every other piece. A reader needs only some pieces: a pipeline stage those of its layers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from asyncmoe.errors import DataError
from asyncmoe.trajectory import Buffer, planes, with_planes
from asyncmoe.trajectory.native import crc32c

T = TypeVar("T")

HEAD = "head"
MOST_HEAD = 1 << 20
"""Bytes of a head."""
_ARRAYS, _MASKS = "arrays", "masks"
_CRC = struct.Struct("<I")


class PackedHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in the pieces of a trajectory.

    Attributes:
        header: first frame of `asyncmoe.trajectory.encode`.
        arrays: bytes of each of its arrays.
        pieces: length and checksum of each piece, by name.
        layers: numbers of the layers with routes.
    """

    header: bytes
    arrays: tuple[int, ...]
    pieces: dict[str, tuple[int, int]]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """A trajectory, or a part of it, that a reader wants.

    Attributes:
        stored: name of its group.
        layers, masks: as for `asyncmoe.trajectory.part`.
    """

    stored: str
    key: str
    layers: tuple[int, ...] | None = None
    masks: bool = True

    @property
    def name(self) -> str:
        """For messages."""
        return f"payload {self.stored} {self.key}"


def packed(stored: str, key: str, frames: Sequence[Buffer]) -> dict[str, Buffer]:
    """Return the pieces of a trajectory, by name.

    Args:
        stored: name of its group.
        frames: of `asyncmoe.trajectory.encode`; routes and masks are not copied.
    """
    header, *arrays, _, masks = frames
    routes = planes(frames)
    pieces: dict[str, Buffer] = {_ARRAYS: b"".join(arrays), **{str(layer): plane for layer, plane in routes.items()}}
    if memoryview(masks).nbytes:
        pieces[_MASKS] = masks
    told = {name: (memoryview(piece).nbytes, crc32c(piece)) for name, piece in pieces.items()}
    sizes = tuple(memoryview(array).nbytes for array in arrays)
    head = msgspec.msgpack.encode(PackedHead(bytes(header), sizes, told, tuple(routes)))
    return {HEAD: _CRC.pack(_digest(stored, key, head)) + head, **pieces}


def opened(asked: Asked, data: Buffer | None) -> PackedHead:
    """Return a head. Raises DataError: it is absent, damaged or another's."""
    view = memoryview(data or b"")
    if len(view) < _CRC.size or len(view) > MOST_HEAD:
        raise DataError(asked.name, got="nothing" if data is None else f"{len(view)} bytes", expected="what was put there")
    if _CRC.unpack_from(view)[0] != _digest(asked.stored, asked.key, view[_CRC.size :]):
        raise DataError(asked.name, got="a wrong checksum", expected="what was put there")
    try:
        return msgspec.msgpack.decode(view[_CRC.size :], type=PackedHead)
    except (ValueError, RecursionError) as error:
        raise DataError(asked.name, got=str(error), expected="a trajectory that this version put there") from error


def wanted(asked: Asked, head: PackedHead) -> list[str]:
    """Return the names of the pieces that are asked for, besides the head. Raises DataError: it has not the routes of a layer."""
    layers = head.layers if asked.layers is None else asked.layers if head.layers else ()
    if missing := set(layers) - set(head.layers):
        raise DataError(asked.name, got=f"no routes of layer {min(missing)}", expected=f"a layer of {head.layers}")
    return [_ARRAYS, *map(str, layers), *([_MASKS] if asked.masks and _MASKS in head.pieces else [])]


def unpacked(asked: Asked, head: PackedHead, pieces: Mapping[str, Buffer | None]) -> list[Buffer]:
    """Return the frames of a trajectory, as `asyncmoe.trajectory.part` returns them.

    Args:
        pieces: those that are `wanted`; None: the store has none.

    Raises:
        DataError: a piece is absent, truncated or damaged.
    """
    names = wanted(asked, head)
    for name in names:
        piece, (length, digest) = pieces.get(name), head.pieces[name]
        size = 0 if piece is None else memoryview(piece).nbytes
        if piece is None or size != length:
            raise DataError(f"{asked.name}: {name}", got="nothing" if piece is None else f"{size} bytes", expected=f"{length} bytes")
        if crc32c(piece) != digest:
            raise DataError(f"{asked.name}: {name}", got="a wrong checksum", expected="what was put there")
    found = {name: memoryview(piece) for name in names if (piece := pieces[name]) is not None}
    arrays, at = list[Buffer](), 0
    for size in head.arrays:
        arrays.append(found[_ARRAYS][at : at + size])
        at += size
    if at != len(found[_ARRAYS]):
        raise DataError(asked.name, got=f"{len(found[_ARRAYS])} bytes of arrays", expected=f"{at}")
    masks = found.get(_MASKS, b"") if asked.masks else None
    return with_planes(head.header, arrays, {int(name): found[name] for name in names if name not in (_ARRAYS, _MASKS)}, masks)


def _digest(stored: str, key: str, head: Buffer) -> int:
    return crc32c(head, crc32c(f"{stored} {key}".encode()))


def batches(planned: Iterable[T], nbytes_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield items, in order, of `most` bytes together, or one that is larger."""
    batch, nbytes = list[T](), 0
    for one in planned:
        size = nbytes_of(one)
        if batch and nbytes + size > most:
            yield batch
            batch, nbytes = [], 0
        batch.append(one)
        nbytes += size
    if batch:
        yield batch
