"""Cut transfers into messages of bounded size, identically on both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncmoe.errors import LayoutError
from asyncmoe.reshard.layout import MAX_DIMS
from asyncmoe.reshard.plan import (
    DESTINATION_OFFSET,
    DESTINATION_STRIDES,
    EXTENTS,
    ITEM,
    SOURCE_OFFSET,
    SOURCE_STRIDES,
    WIRE_OFFSET,
    Plan,
    Transfer,
)

BUCKET_BYTES = 64 << 20
"""Default limit on the total size of one message buffer for each pair of ranks (source, destination) that a rank belongs to."""
TRAILER_BYTES = 8
"""Size of the digest after a message's boxes, at the next multiple of 8 bytes."""
FLOOR_BYTES = 64 << 10
"""Minimum size of messages if a transfer is cut further only to have as many as the largest has; each message costs a kernel launch."""
_PARTS_PER_CHUNK = 16
"""A box is cut into parts of at most 1/16 of a message, so that messages are nearly equal in size."""


class Cut(NamedTuple):
    """The message size and the number of messages of a transfer.

    Attributes:
        limit: maximum bytes of a message, trailer included.
        messages: number of messages.
    """

    limit: int
    messages: int


@dataclass(frozen=True, eq=False)
class Chunks:
    """A transfer as a sequence of messages.

    Attributes:
        source, destination: ranks.
        copies: as `Transfer.copies`, in the order of the messages; WIRE_OFFSET is the offset in the copy's message.
        firsts: int64[n + 1]; message i is `copies[firsts[i]:firsts[i + 1]]`.
        nbytes: bytes of the boxes in each message.
    """

    source: int
    destination: int
    copies: np.ndarray
    firsts: np.ndarray
    nbytes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.nbytes)

    def message_bytes(self, index: int) -> int:
        """Return the size of a message on the wire, in bytes."""
        return trailer_offset(self.nbytes[index]) + TRAILER_BYTES

    @property
    def slot_bytes(self) -> int:
        """Size of a buffer that fits any of the messages, in bytes."""
        return trailer_offset(max(self.nbytes)) + TRAILER_BYTES


def trailer_offset(nbytes: int) -> int:
    """Return the offset of the digest in a message with boxes of `nbytes` bytes."""
    return -(-nbytes // 8) * 8


def cuts_of(plan: Plan, bucket_bytes: int) -> dict[tuple[int, int], Cut]:
    """Decide how the transfer of every pair of ranks is cut, so that one message for each of a rank's pairs fits into `bucket_bytes` in
    total, and all large transfers have the same number of messages.

    An eighth of a bucket is reserved for the copy tables. A quarter of the rest is divided evenly among a rank's pairs, three quarters in
    proportion to their bytes; a pair uses the smaller of its two ends' shares. The pair that needs the most messages sets the number for
    all, so that in every round each rank moves the same fraction of its bytes, and no rank waits for a busier one (measured by
    `benchmarks.rounds`). Only a pair with little traffic has fewer messages, of at least `FLOOR_BYTES`.

    The result depends on the traffic of the whole plan, which can be computed from any part of the plan, so both ends agree.
    """
    room = bucket_bytes - bucket_bytes // 8
    traffic: list[list[int]] = plan.match.traffic().tolist()
    pairs: dict[int, int] = {}
    total: dict[int, int] = {}
    for source, destination, nbytes in traffic:
        for rank in (source, destination):
            pairs[rank] = pairs.get(rank, 0) + 1
            total[rank] = total.get(rank, 0) + nbytes
    limits = {}
    for source, destination, nbytes in traffic:
        ends = (source, destination)
        even = room // (4 * max(pairs[rank] for rank in ends))
        weighted = 3 * room * nbytes // (4 * max(total[rank] for rank in ends))
        limits[ends] = (even + weighted) // 8 * 8
    needed = {(s, d): -(-nbytes // _filled(limits[s, d])) for s, d, nbytes in traffic}
    rounds = max(needed.values(), default=1)
    return {(s, d): Cut(limits[s, d], max(needed[s, d], min(rounds, nbytes // FLOOR_BYTES))) for s, d, nbytes in traffic}


def _filled(limit: int) -> int:
    """Return how many bytes of boxes always fit into a message of `limit` bytes, given that parts are not cut further."""
    room = limit - TRAILER_BYTES
    return max(1, room - room // _PARTS_PER_CHUNK)


def joined(sizes: Sequence[int], slot_bytes: int) -> list[range]:
    """Return which successive encoded messages travel as one: as many as fit into a slot. Both ends of a lane compute the same result."""
    found, first, filled = [], 0, 0
    for number, nbytes in enumerate(sizes):
        if filled + nbytes > slot_bytes and number > first:
            found.append(range(first, number))
            first, filled = number, 0
        filled += nbytes
    return [*found, range(first, len(sizes))]


def cut_transfer(plan: Plan, transfer: Transfer, limit: int, messages: int = 1, *, most: int | None = None) -> Chunks:
    """Cut a transfer between two ranks into messages of at most `limit` bytes, trailer included.

    Args:
        messages: number of messages of nearly equal size; more are made if they would exceed `limit`.
        most: maximum bytes of the parts into which boxes are cut; the messages' size may require smaller ones. TENSOR and START of a part
            are those of the whole box.

    Raises:
        LayoutError: not even one element fits; names the ranks and the storage.
    """
    room = limit - TRAILER_BYTES
    widest = int(transfer.copies[:, ITEM].argmax())
    item = int(transfer.copies[widest, ITEM])
    if room < item:
        name = list(plan.destinations[transfer.destination])[int(transfer.copies[widest, 2])]
        box = [int(extent) for extent in transfer.copies[widest, EXTENTS]]
        where = f"bucket_bytes, for a box {box} of storage {name} from rank {transfer.source} to rank {transfer.destination}"
        hint = "raise bucket_bytes, which all peers of a rank share"
        raise LayoutError(
            where, got=f"room for {max(0, room)} bytes in a message", expected=f"room for at least one element of {item} bytes", hint=hint
        )
    total = int(_nbytes(transfer.copies).sum())
    part = max(item, min(room, total // messages) // _PARTS_PER_CHUNK)
    part = part if most is None else min(part, most)
    copies = cut_boxes(transfer.copies, part)
    end = np.cumsum(_nbytes(copies))
    firsts = [0]
    while firsts[-1] < len(copies):
        before = int(end[firsts[-1] - 1]) if firsts[-1] else 0
        goal = total * min(len(firsts), messages) // messages + part // 2  # cumulative, so that rounding errors do not add up
        fitting = int(np.searchsorted(end, before + room, "right"))
        firsts.append(min(fitting, max(firsts[-1] + 1, int(np.searchsorted(end, goal, "right")))))
    edges = np.concatenate([[0], end])[firsts]
    copies[:, WIRE_OFFSET] = end - _nbytes(copies) - np.repeat(edges[:-1], np.diff(firsts))
    return Chunks(transfer.source, transfer.destination, copies, np.array(firsts, np.int64), tuple(np.diff(edges).tolist()))


def cut_boxes(copies: np.ndarray, limit: int) -> np.ndarray:
    """Return the copies (as `Transfer.copies`) with boxes of more than `limit` bytes cut along their outermost dimensions."""
    copies = copies.copy()
    while True:
        nbytes = _nbytes(copies)
        large = nbytes > np.maximum(limit, copies[:, ITEM])
        if not large.any():
            return copies
        every = np.arange(len(copies))
        axis = (copies[:, EXTENTS] > 1).argmax(1)
        length = copies[every, EXTENTS.start + axis]
        step = np.where(large, np.maximum(1, limit * length // nbytes), length)
        parts = -(-length // step)
        row = np.repeat(every, parts)
        start = ranges(np.zeros(len(copies), np.int64), parts) * step[row]
        axis, length, step = axis[row], length[row], step[row]
        copies = copies[row]
        every = np.arange(len(copies))
        copies[every, EXTENTS.start + axis] = np.minimum(step, length - start)
        copies[:, SOURCE_OFFSET] += start * copies[every, SOURCE_STRIDES.start + axis]
        copies[:, DESTINATION_OFFSET] += start * copies[every, DESTINATION_STRIDES.start + axis]


def message_strides(copies: np.ndarray) -> np.ndarray:
    """Return int64[n, MAX_DIMS]: byte strides of the copies' boxes when stored row-major."""
    strides = np.empty((len(copies), MAX_DIMS), np.int64)
    strides[:, -1] = copies[:, ITEM]
    for k in range(MAX_DIMS - 2, -1, -1):
        strides[:, k] = strides[:, k + 1] * copies[:, EXTENTS][:, k + 1]
    return strides


def ranges(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return start[0], start[0] + 1, ... (count[0] values), start[1], ..."""
    shift: np.ndarray = np.repeat(start - np.cumsum(count) + count, count)
    return shift + np.arange(len(shift))


def _nbytes(copies: np.ndarray) -> np.ndarray:
    nbytes: np.ndarray = copies[:, EXTENTS].prod(1) * copies[:, ITEM]
    return nbytes
