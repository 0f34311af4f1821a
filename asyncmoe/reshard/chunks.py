"""Cutting transfers into messages of bounded size, the same way on both ends."""

from __future__ import annotations

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

TRAILER_BYTES = 8
"""Behind the boxes of a message, from the next multiple of 8 bytes on: their digest."""
FLOOR_BYTES = 64 << 10
"""Messages are not made smaller than this only to have as many of them as other pairs have: each costs a launch."""
_PARTS_PER_CHUNK = 16
"""A box is cut into parts of at most this fraction of a message, so that messages are nearly equal."""


class Cut(NamedTuple):
    """How a transfer becomes messages.

    Attributes:
        limit: bytes of the largest, trailer included.
        messages: how many there are.
    """

    limit: int
    messages: int


@dataclass(frozen=True, eq=False)
class Chunks:
    """A transfer as a sequence of messages.

    Attributes:
        source, destination: ranks.
        copies: as `Transfer.copies`, in the order of the messages; WIRE_OFFSET is the place in its message.
        firsts: int64[n + 1]; message i is `copies[firsts[i]:firsts[i + 1]]`.
        nbytes: bytes of each message's boxes.
    """

    source: int
    destination: int
    copies: np.ndarray
    firsts: np.ndarray
    nbytes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.nbytes)

    def message_bytes(self, index: int) -> int:
        """Bytes of a message on the wire."""
        return trailer_offset(self.nbytes[index]) + TRAILER_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of a buffer that any message fits into."""
        return trailer_offset(max(self.nbytes)) + TRAILER_BYTES


def trailer_offset(nbytes: int) -> int:
    """Where in a message of so many bytes the digest lies."""
    return -(-nbytes // 8) * 8


def cuts_of(plan: Plan, bucket_bytes: int) -> dict[tuple[int, int], Cut]:
    """How every pair's transfer is cut, such that one message of each pair a rank belongs to fit into `bucket_bytes`, and that all pairs
    take equally many rounds.

    An eighth of a bucket is left for the tables of the copies. A quarter of the rest is divided evenly among a rank's pairs, three
    quarters by their bytes; a pair may use the smaller of its two ends' shares. The pair that needs most messages by that says how many
    all have: in every round each rank then moves the same part of all it has to move, and no rank waits for a busier one
    (`asyncmoe.bench.rounds` has the figures). A pair with little to move has fewer messages, of `FLOOR_BYTES` or more.

    Depends on the traffic of the whole plan, which a part of a plan knows too, so both ends find the same.
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
    """Bytes of boxes that a message of at most `limit` bytes can always be given: its parts are not cut further."""
    room = limit - TRAILER_BYTES
    return max(1, room - room // _PARTS_PER_CHUNK)


def cut_transfer(plan: Plan, transfer: Transfer, limit: int, messages: int = 1) -> Chunks:
    """Cut a transfer between two ranks into messages of at most `limit` bytes, trailer included.

    Args:
        messages: how many there are to be, of nearly equal size; there are more where they would not fit.

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
        cure = "it is divided among all ranks that a rank exchanges with: raise it"
        raise LayoutError(
            where, got=f"room for {max(0, room)} bytes in a message", expected=f"at least one element of {item} bytes", cure=cure
        )
    total = int(_nbytes(transfer.copies).sum())
    part = max(item, min(room, total // messages) // _PARTS_PER_CHUNK)
    copies = cut_boxes(transfer.copies, part)
    end = np.cumsum(_nbytes(copies))
    firsts = [0]
    while firsts[-1] < len(copies):
        before = int(end[firsts[-1] - 1]) if firsts[-1] else 0
        goal = total * min(len(firsts), messages) // messages + part // 2  # of all messages up to here, so that errors do not add up
        fitting = int(np.searchsorted(end, before + room, "right"))
        firsts.append(min(fitting, max(firsts[-1] + 1, int(np.searchsorted(end, goal, "right")))))
    edges = np.concatenate([[0], end])[firsts]
    copies[:, WIRE_OFFSET] = end - _nbytes(copies) - np.repeat(edges[:-1], np.diff(firsts))
    return Chunks(transfer.source, transfer.destination, copies, np.array(firsts, np.int64), tuple(np.diff(edges).tolist()))


def cut_boxes(copies: np.ndarray, limit: int) -> np.ndarray:
    """Copies (columns of `Transfer.copies`) with boxes of more than `limit` bytes cut across their outermost dimensions."""
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
    """int64[n, MAX_DIMS]: byte strides of boxes that lie row-major."""
    strides = np.empty((len(copies), MAX_DIMS), np.int64)
    strides[:, -1] = copies[:, ITEM]
    for k in range(MAX_DIMS - 2, -1, -1):
        strides[:, k] = strides[:, k + 1] * copies[:, EXTENTS][:, k + 1]
    return strides


def ranges(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """start[0], start[0] + 1, ... (count[0] of them), start[1], ..."""
    shift: np.ndarray = np.repeat(start - np.cumsum(count) + count, count)
    return shift + np.arange(len(shift))


def _nbytes(copies: np.ndarray) -> np.ndarray:
    nbytes: np.ndarray = copies[:, EXTENTS].prod(1) * copies[:, ITEM]
    return nbytes
