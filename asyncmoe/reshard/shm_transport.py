"""Messages between processes on one host in POSIX shared memory: packed and unpacked in place, with no copy in between."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError, TransferError, WaitTimeout
from asyncmoe.reshard.transport import Lane, Link, TransportEnd

_READY, _NOT_YET, _GONE = 0, 1, 2
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
        return _ShmLink(self.rank, outgoing, incoming, created, attached, slots)

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


class _ShmLink:
    """See `asyncmoe.reshard.transport.Link`."""

    device = "cpu"

    def __init__(
        self,
        rank: int,
        outgoing: Sequence[Lane],
        incoming: Sequence[Lane],
        created: list[_C.ShmRing],
        attached: list[_C.ShmRing],
        slots: int,
    ) -> None:
        self._rank, self._outgoing, self._incoming = rank, outgoing, incoming
        self._created, self._attached = created, attached
        self._out = [[ring.slot(i) for i in range(used_slots(lane, slots))] for lane, ring in zip(outgoing, created, strict=True)]
        self._in = [[ring.slot(i) for i in range(used_slots(lane, slots))] for lane, ring in zip(incoming, attached, strict=True)]
        self._posted = [0] * len(outgoing)
        self._taken = [0] * len(incoming)

    def resize(self, outgoing: Sequence[Lane], incoming: Sequence[Lane]) -> None:
        self._outgoing, self._incoming = outgoing, incoming

    def pack_into(self, lane: int, number: int, timeout_s: float) -> np.ndarray:
        peer = self._outgoing[lane].peer
        wait_for(self._created[lane], self._rank, peer, peer, "room for another message", timeout_s)
        slots = self._out[lane]
        return slots[self._posted[lane] % len(slots)][: self._outgoing[lane].message_bytes[number]]

    def post(self, lane: int, number: int) -> None:
        self._posted[lane] += 1
        self._created[lane].advance()

    def close_round(self, number: int, timeout_s: float) -> None:
        pass

    def unpack_from(self, lane: int, number: int, timeout_s: float) -> np.ndarray:
        peer = self._incoming[lane].peer
        wait_for(self._attached[lane], peer, self._rank, peer, "its message", timeout_s)
        slots = self._in[lane]
        return slots[self._taken[lane] % len(slots)][: self._incoming[lane].message_bytes[number]]

    def release(self, lane: int, number: int) -> None:
        self._taken[lane] += 1
        self._attached[lane].advance()

    def finish(self, timeout_s: float) -> None:
        # A sender that left now would remove rings to which receivers have not yet attached.
        for lane, ring, slots in zip(self._outgoing, self._created, self._out, strict=True):
            wait_for(ring, self._rank, lane.peer, lane.peer, "to take the last message", timeout_s, needed=len(slots))

    def close(self) -> None:
        # A ring exists as long as a view of one of its slots.
        self._out, self._in, self._created, self._attached = [], [], [], []


def wait_for(ring: _C.ShmRing, source: int, destination: int, peer: int, what: str, timeout_s: float, needed: int = 1) -> None:
    """Wait until `needed` slots of a ring belong to this end.

    Raises:
        TransferError: the peer is gone.
        WaitTimeout: the peer did not hand them over in time.
    """
    started = time.monotonic()
    result = ring.wait(timeout_s, needed)
    if result == _GONE:
        raise TransferError(source, destination, f"rank {peer} is gone")
    if result == _NOT_YET:
        raise WaitTimeout(f"rank {peer}", what, time.monotonic() - started)


def used_slots(lane: Lane, slots: int) -> int:
    """Return the number of slots in a lane's ring."""
    return min(slots, len(lane.message_bytes))
