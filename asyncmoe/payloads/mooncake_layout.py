"""Where the trajectories of a group lie in Mooncake's store. Pure.

The pieces of all its trajectories are one string of bytes, which lies in objects of `OBJECT_BYTES`: what an object costs besides its bytes
is paid once for many pieces, and a reader asks for ranges. An index, an object of its own, has the heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from asyncmoe.errors import DataError
from asyncmoe.payloads import packed
from asyncmoe.payloads.packed import HEAD, Asked, PackedHead
from asyncmoe.trajectory import Buffer
from asyncmoe.trajectory.native import crc32c

OBJECT_BYTES = 8 << 20
_CRC_BYTES = 4


class GroupIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a group.

    Attributes:
        nbytes: of the pieces of all its trajectories.
        heads: of each trajectory its head, and where its pieces begin, by its key.
    """

    nbytes: int
    heads: dict[str, tuple[bytes, int]]


@dataclass(frozen=True)
class StoredRange:
    """Bytes of an object.

    Attributes:
        source: where they begin in the object.
        target: where they begin in the reader's buffer.
    """

    key: str
    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class PlannedRead:
    """A trajectory, or a part of it, whose head was read.

    Attributes:
        places: where its wanted pieces begin in the group, and how long they are, by name, in the order in which they lie there.
    """

    asked: Asked
    head: PackedHead
    places: Mapping[str, tuple[int, int]]

    @property
    def nbytes(self) -> int:
        """Of the pieces."""
        return sum(length for _, length in self.places.values())


def index_key(stored: str) -> str:
    """The object with a group's index."""
    return f"{stored}:index"


def object_keys(stored: str, nbytes: int) -> list[str]:
    """The objects with a group's pieces."""
    return [f"{stored}:{number}" for number in range(-(-nbytes // OBJECT_BYTES))]


def joined(stored: str, frames: Mapping[str, Sequence[Buffer]]) -> tuple[list[Buffer], GroupIndex]:
    """Return the pieces of a group, in order, and its index. Routes and masks are not copied."""
    parts, at, heads = list[Buffer](), 0, dict[str, tuple[bytes, int]]()
    for key, one in frames.items():
        pieces = packed.packed(stored, key, one)
        heads[key] = bytes(pieces.pop(HEAD)), at
        parts += pieces.values()
        at += sum(memoryview(piece).nbytes for piece in pieces.values())
    return parts, GroupIndex(at, heads)


def cut(parts: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """Yield what lies in each object, in views of `parts`."""
    room, cut = OBJECT_BYTES, list[memoryview]()
    for part in parts:
        view = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        while len(view):
            cut.append(view[:room])
            view, room = view[room:], room - len(cut[-1])
            if room == 0:
                yield cut
                room, cut = OBJECT_BYTES, []
    if cut:
        yield cut


def sealed(stored: str, index: GroupIndex) -> bytes:
    """Return an index as it lies in the store, with a checksum of it and of the group's name."""
    data = msgspec.msgpack.encode(index)
    return _digest(stored, data) + data


def opened(stored: str, data: Buffer | None) -> GroupIndex:
    """Return an index. Raises DataError: it is absent, damaged or another's."""
    view = memoryview(data or b"")
    if len(view) < _CRC_BYTES:
        raise _unlike(stored, "nothing" if data is None else f"{len(view)} bytes")
    if bytes(view[:_CRC_BYTES]) != _digest(stored, view[_CRC_BYTES:]):
        raise _unlike(stored, "a wrong checksum")
    try:
        return msgspec.msgpack.decode(view[_CRC_BYTES:], type=GroupIndex)
    except (ValueError, RecursionError) as error:
        raise _unlike(stored, str(error)) from error


def planned(asked: Asked, index: GroupIndex) -> PlannedRead:
    """Return what to read. Raises DataError: the trajectory is not in the group, or its head is damaged."""
    data, at = index.heads.get(asked.key, (None, 0))
    head = packed.opened(asked, data)
    names, places = set(packed.wanted(asked, head)), dict[str, tuple[int, int]]()
    for name, (length, _) in head.pieces.items():
        if name in names:
            places[name] = at, length
        at += length
    if at > index.nbytes:
        raise DataError(asked.name, got=f"pieces up to byte {at}", expected=f"{index.nbytes} bytes")
    return PlannedRead(asked, head, places)


def ranges(plan: PlannedRead, target: int) -> Iterator[StoredRange]:
    """Yield what to read of which object; the pieces lie one behind the other from `target` on. Neighbours are read together."""
    begin = end = 0
    for at, length in [*plan.places.values(), (-1, 0)]:
        if at == end:
            end += length
            continue
        while begin < end:
            number, source = divmod(begin, OBJECT_BYTES)
            nbytes = min(end - begin, OBJECT_BYTES - source)
            yield StoredRange(f"{plan.asked.stored}:{number}", source, target, nbytes)
            begin, target = begin + nbytes, target + nbytes
        begin, end = at, at + length


def _digest(stored: str, data: Buffer) -> bytes:
    return crc32c(data, crc32c(stored.encode())).to_bytes(_CRC_BYTES, "little")


def _unlike(stored: str, got: str) -> DataError:
    return DataError(f"payload {stored}", got=got, expected="what was put there")
