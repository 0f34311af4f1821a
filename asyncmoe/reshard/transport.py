"""How messages reach other ranks: two narrow interfaces, and the link an exchange sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from asyncmoe.errors import InvariantBroken
from asyncmoe.reshard import device_threads
from asyncmoe.reshard.memory import memory_of

LOOK_S = 0.5
"""Between two calls of a `Watch`."""

Watch = Callable[[], None]
"""Called while peers are waited for, in the thread that waits: raises what makes waiting vain."""


def nothing_to_watch() -> None:
    """A `Watch` where nobody else knows of the peers."""


Buffer = Any
"""Bytes in the transport's kind of memory, as its `empty` returns them; can be sliced."""


@runtime_checkable
class Transport(Protocol):
    """Messages that are sent and received.

    One whose `exchange` waits for messages on a GPU, instead of enqueueing them in the order of the caller's stream, says so by an
    attribute `waits = True`; it is then called from a thread of its own.

    One with something to end has a method `end(idle, runs)`, which `Exchanger.close` calls: not idle after a run that failed, when a peer
    may still wait, and `exchange` may be under way in another thread; and after so many runs that went well.
    """

    rank: int

    def empty(self, nbytes: int) -> Buffer:
        """A new message buffer of uint8, in memory this transport can send from."""

    def exchange(self, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]], timeout_s: float) -> None:
        """Send each buffer to its rank and fill each buffer from its rank; at most one message a pair and direction.

        Returns when all buffers may be reused. Called from one thread at a time, which need not be the main one.

        Raises:
            asyncmoe.errors.WaitTimeout: naming the rank that was not there in time.
        """


@dataclass(frozen=True)
class Lane:
    """One direction between this rank and a peer.

    Attributes:
        peer: the other rank.
        message_bytes: of each message, in order.
        slot_bytes: the largest of them, the same on both ends.
    """

    peer: int
    message_bytes: tuple[int, ...]
    slot_bytes: int


class Link(Protocol):
    """The lanes of one exchange that runs again and again. Message n of a lane uses slot `n % slots`; rounds go up from 0.

    One whose slots are all on one device says which by an attribute `device` ("cpu", "cuda:0").

    A rank packs every outgoing lane's message of a round, closes the round, and then takes what arrived of an earlier one.
    """

    def pack_into(self, lane: int, number: int, timeout_s: float) -> Buffer:
        """The free buffer for message `number` of an outgoing lane; waits until the one before in that slot is gone."""

    def post(self, lane: int, number: int) -> None:
        """The message is complete."""

    def close_round(self, number: int, timeout_s: float) -> None:
        """All outgoing messages of this round are posted."""

    def unpack_from(self, lane: int, number: int, timeout_s: float) -> Buffer:
        """Message `number` of an incoming lane; waits until it is there."""

    def release(self, lane: int, number: int) -> None:
        """The message has been read."""

    def finish(self, timeout_s: float) -> None:
        """End of a run: everything that was posted has left this rank's own buffers, or lies where its receiver will find it."""

    def close(self) -> None:
        """Let go of all memory. Peers that still wait see it."""


@runtime_checkable
class SharedTransport(Protocol):
    """Messages that lie where both ends see them."""

    rank: int

    def connect(self, outgoing: Sequence[Lane], incoming: Sequence[Lane], slots: int, timeout_s: float) -> Link:
        """Meet the peers of all lanes.

        Raises:
            asyncmoe.errors.WaitTimeout: naming the rank that was not there in time.
        """


class LocalTransport:
    """One process: nothing travels."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def empty(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def exchange(self, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]], timeout_s: float) -> None:
        others = sorted({rank for rank, _ in (*sends, *receives)})
        if others:
            raise InvariantBroken(f"a plan for ranks {[self.rank, *others]} was given to the transport of one process")


class MessageLink:
    """A link over a `Transport`: a round is one call of its `exchange`, in a thread of its own while this one packs and unpacks.

    Unless `threaded`, rounds are exchanged from the calling thread: transports between GPUs enqueue and return, and it is the
    caller's stream that orders them.

    Args:
        watch: called while another thread exchanges.
    """

    def __init__(
        self,
        transport: Transport,
        outgoing: Sequence[Lane],
        incoming: Sequence[Lane],
        slots: int,
        threaded: bool,
        watch: Watch = nothing_to_watch,
    ) -> None:
        self._watch = watch
        self._transport, self._outgoing, self._incoming, self._slots = transport, outgoing, incoming, slots
        self._out = [[transport.empty(lane.slot_bytes) for _ in range(min(slots, len(lane.message_bytes)))] for lane in outgoing]
        self._in = [[transport.empty(lane.slot_bytes) for _ in range(min(slots, len(lane.message_bytes)))] for lane in incoming]
        self._thread = device_threads.pool(self._device(), 1, "exchange") if threaded and (outgoing or incoming) else None
        self._rounds: dict[int, Future[None]] = {}

    @property
    def buffers(self) -> list[Buffer]:
        """All message buffers."""
        return [buffer for lane in (*self._out, *self._in) for buffer in lane]

    def _device(self) -> str:
        """Where the message buffers are."""
        return memory_of(self.buffers[0], "message buffer").device if self.buffers else "cpu"

    def pack_into(self, lane: int, number: int, timeout_s: float) -> Buffer:
        self._wait(number - self._slots)
        return self._message(self._out, self._outgoing, lane, number)

    def post(self, lane: int, number: int) -> None:
        pass

    def close_round(self, number: int, timeout_s: float) -> None:
        sends = self._messages(self._out, self._outgoing, number)
        receives = self._messages(self._in, self._incoming, number)
        if self._thread is None:
            self._transport.exchange(sends, receives, timeout_s)
        else:
            self._rounds[number] = self._thread.submit(self._transport.exchange, sends, receives, timeout_s)

    def unpack_from(self, lane: int, number: int, timeout_s: float) -> Buffer:
        self._wait(number)
        return self._message(self._in, self._incoming, lane, number)

    def release(self, lane: int, number: int) -> None:
        pass

    def finish(self, timeout_s: float) -> None:
        for number in sorted(self._rounds):
            self._wait(number)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._out, self._in = [], []

    def _wait(self, number: int) -> None:
        """Until a round is over; the transport's own time-out bounds it."""
        if number in self._rounds:
            exchanged = self._rounds.pop(number)
            while not wait([exchanged], LOOK_S).done:
                self._watch()
            exchanged.result()

    def _messages(self, buffers: list[list[Buffer]], lanes: Sequence[Lane], number: int) -> list[tuple[int, Buffer]]:
        present = [i for i, lane in enumerate(lanes) if number < len(lane.message_bytes)]
        return [(lanes[i].peer, self._message(buffers, lanes, i, number)) for i in present]

    def _message(self, buffers: list[list[Buffer]], lanes: Sequence[Lane], lane: int, number: int) -> Buffer:
        return buffers[lane][number % self._slots][: lanes[lane].message_bytes[number]]
