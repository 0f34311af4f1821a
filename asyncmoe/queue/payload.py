"""The payload of a finished group: a header, then the encoded frames of its trajectories.

A 4-byte little-endian length, a msgpack header of that length, and the frames one after the other, in the header's order.
"""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise

import msgspec

from asyncmoe.log.log import Log, Place
from asyncmoe.queue.group_buffer import Frames, Group
from asyncmoe.rpc.item import Item
from asyncmoe.trajectory import Buffer

_LENGTH = struct.Struct("<I")


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    attempt: int
    items: tuple[Item, ...]
    sizes: tuple[tuple[int, ...], ...]
    """Bytes of each frame of each item."""


def encode(group: Group, frames: Frames) -> list[Buffer]:
    """Return the parts of a group's payload, without copying frames."""
    ordered = [frames[item.key] for item in group.items]
    sizes = tuple(tuple(memoryview(frame).nbytes for frame in one) for one in ordered)
    header = msgspec.msgpack.encode(_Header(group.attempt, group.items, sizes))
    return [_LENGTH.pack(len(header)), header, *(frame for one in ordered for frame in one)]


async def write(kept: Log, group: Group, frames: Frames, writing: list[int]) -> int:
    """Write a group's payload to a log; return its position once it is durable. Until then, `writing` has the position, which `forget` must
    not pass.

    Raises:
        StorageError: the log failed, or is full.
    """
    position = kept.append(encode(group, frames))
    writing.append(position)
    try:
        await kept.durable(position)
    finally:
        writing.remove(position)
    return position


def decode(payload: Buffer, arrival: int, place: Place) -> tuple[Group, Frames]:
    """Invert `encode`; frames are views of the payload, whose checksum must have been verified. `place`: the payload's place in the log."""
    view = memoryview(payload)
    at = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    header = msgspec.msgpack.decode(view[_LENGTH.size : at], type=_Header)
    frames: Frames = {}
    for item, sizes in zip(header.items, header.sizes, strict=True):
        ends = [*accumulate(sizes, initial=at)]
        frames[item.key], at = [view[begin:end] for begin, end in pairwise(ends)], ends[-1]
    return Group(arrival, header.items, header.attempt, place), frames
