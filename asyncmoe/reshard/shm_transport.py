"""Messages between processes on one host in POSIX shared memory: packed and unpacked in place, with no copy in between."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError, TransferError, WaitTimeout
from asyncmoe.reshard.transport import Buffer, Lane, Link, TransportEnd

READY, _NOT_YET, GONE = 0, 1, 2
"""Results of `ShmRing.wait` (csrc/shm.h)."""
_LONGEST_SESSION = 64


class ShmTransport:
    """One ring of slots for each pair of ranks, in `/dev/shm`. A ring's name is removed as soon as both ends are connected.

    Args:
        rank: this process's rank.
        session: name for one exchanger of one group of ranks, unique on this host and the same on all these ranks. Letters, digits, `_`,
            `.` and `-`.

    Raises:
        LayoutError: an invalid session name.
    """

    def __init__(self, rank: int, session: str) -> None:
        if not re.fullmatch(rf"[A-Za-z0-9_.-]{{1,{_LONGEST_SESSION}}}", session):
            expected = f"1 to {_LONGEST_SESSION} letters, digits, _, . or -"
            raise LayoutError("session of shared memory", got=repr(session), expected=expected)
        self.rank, self._session = rank, session

    def connect(self, outgoing: Sequence[Lane], incoming: Sequence[Lane], slots: int, timeout_s: float) -> Link:
        """As `SharedTransport.connect`; allocates memory for all slots.

        Raises:
            WaitTimeout: a sender did not connect in time.
            TransferError: /dev/shm is full, or a ring's size differs from the size this rank expects.
        """
        created, attached = self.rings(outgoing, incoming, slots, timeout_s)
        out = [RingEnd(self.rank, lane.peer, lane, slots, ring) for lane, ring in zip(outgoing, created, strict=True)]
        return RingLink(out, [RingEnd(lane.peer, self.rank, lane, slots, ring) for lane, ring in zip(incoming, attached, strict=True)])

    def rings(
        self, outgoing: Sequence[Lane], incoming: Sequence[Lane], slots: int, timeout_s: float
    ) -> tuple[list[_C.ShmRing], list[_C.ShmRing]]:
        """Return this rank's ends of all lanes' rings (outgoing, incoming). Raises as `connect`."""
        started = time.monotonic()
        created = [self._create(lane, slots) for lane in outgoing]
        return created, [self._attach(lane, slots, started, timeout_s) for lane in incoming]

    def _name(self, source: int, destination: int) -> str:
        return f"/asyncmoe-{self._session}-{source}-{destination}"

    def _create(self, lane: Lane, slots: int) -> _C.ShmRing:
        try:
            return _C.ShmRing.create(self._name(self.rank, lane.peer), used_slots(lane, slots), lane.slot_bytes)
        except (RuntimeError, ValueError) as error:
            raise TransferError(self.rank, lane.peer, str(error)) from error

    def _attach(self, lane: Lane, slots: int, started: float, timeout_s: float) -> _C.ShmRing:
        pause = 0.001
        while True:
            try:
                ring = _C.ShmRing.attach(self._name(lane.peer, self.rank), used_slots(lane, slots), lane.slot_bytes)
            except (RuntimeError, ValueError) as error:
                raise TransferError(lane.peer, self.rank, str(error)) from error
            if ring is not None:
                return ring
            waited = time.monotonic() - started
            if waited > timeout_s:
                raise WaitTimeout(f"rank {lane.peer}", f"its ring of shared memory for rank {self.rank}", waited)
            time.sleep(pause)
            pause = min(0.05, 2 * pause)


def open_shm(end: TransportEnd) -> ShmTransport:
    """Open a rank's end of a channel through shared memory."""
    return ShmTransport(end.rank, end.session)


class RingEnd:
    """This rank's end of a lane: the ring that hands its slots over, and the number of messages that passed so far."""

    def __init__(self, source: int, destination: int, lane: Lane, slots: int, ring: _C.ShmRing) -> None:
        self.source, self.destination, self.lane, self.ring = source, destination, lane, ring
        self.slots, self.count = used_slots(lane, slots), 0

    def slot(self, number: int) -> Buffer:
        """Return the buffer of message `number`."""
        return self.ring.slot(self.count % self.slots)[: self.lane.message_bytes[number]]

    def advance(self) -> None:
        """Hand the slot over to the peer."""
        self.count += 1
        self.ring.advance()

    def wait(self, what: str, timeout_s: float, needed: int = 1) -> None:
        """Wait until `needed` slots belong to this end.

        Raises:
            TransferError: the peer is gone.
            WaitTimeout: the peer did not hand them over in time.
        """
        started = time.monotonic()
        result = self.ring.wait(timeout_s, needed)
        if result == GONE:
            raise TransferError(self.source, self.destination, f"rank {self.lane.peer} is gone")
        if result == _NOT_YET:
            raise WaitTimeout(f"rank {self.lane.peer}", what, time.monotonic() - started)


class RingLink:
    """See `asyncmoe.reshard.transport.Link`."""

    device = "cpu"

    def __init__(self, out: Sequence[RingEnd], into: Sequence[RingEnd]) -> None:
        self._out: Sequence[RingEnd] = out
        self._into: Sequence[RingEnd] = into

    def resize(self, outgoing: Sequence[Lane], incoming: Sequence[Lane]) -> None:
        for end, lane in zip((*self._out, *self._into), (*outgoing, *incoming), strict=True):
            end.lane = lane

    def pack_into(self, lane: int, number: int, timeout_s: float) -> Buffer:
        self._wait(self._out[lane], "room for another message", timeout_s)
        return self._out[lane].slot(number)

    def post(self, lane: int, number: int) -> None:
        self._hand_over(self._out[lane])

    def close_round(self, number: int, timeout_s: float) -> None:
        pass

    def unpack_from(self, lane: int, number: int, timeout_s: float) -> Buffer:
        self._wait(self._into[lane], "its message", timeout_s)
        return self._into[lane].slot(number)

    def release(self, lane: int, number: int) -> None:
        self._hand_over(self._into[lane])

    def finish(self, timeout_s: float) -> None:
        # A sender that left now would remove rings to which receivers have not yet attached.
        for end in self._out:
            end.wait("to take the last message", timeout_s, needed=end.slots)

    def close(self) -> None:
        self._out, self._into = [], []  # a ring exists as long as a view of one of its slots

    def _wait(self, end: RingEnd, what: str, timeout_s: float) -> None:
        end.wait(what, timeout_s)

    def _hand_over(self, end: RingEnd) -> None:
        end.advance()


def used_slots(lane: Lane, slots: int) -> int:
    """Return the number of slots in a lane's ring."""
    return min(slots, len(lane.message_bytes))
