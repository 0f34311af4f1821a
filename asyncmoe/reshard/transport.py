"""Transports of messages between ranks: two narrow interfaces, and the link an exchange uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from asyncmoe.errors import AsyncmoeError, InvariantBroken
from asyncmoe.reshard import device_threads
from asyncmoe.reshard.gpu import Relieve, nothing_to_give
from asyncmoe.reshard.memory import memory_of

LOOK_S = 0.5
"""Seconds between two calls of a `Watch`."""

Watch = Callable[[], None]
"""Called in the waiting thread while it waits for peers; raises an error if waiting is futile."""


def nothing_to_watch() -> None:
    """A `Watch` for callers that have no other information about the peers."""


@dataclass(frozen=True, kw_only=True)
class TransportEnd:
    """A rank's end of a channel, from which a transport is opened (`asyncmoe.config.transports`).

    Attributes:
        rank, world: this process's rank, and the number of ranks.
        session: name of the channel, unique on every host and the same on all ranks; letters, digits and `-`, at most 64 characters.
        timeout_s: how long to wait for the other ranks.
        device: CUDA number of this process's GPU; None: the weights are in host memory.
        stream: the `Exchanger`'s stream, a cudaStream_t as an integer.
        relieve: see `asyncmoe.reshard.gpu.Relieve`; for allocations on the GPU.
        watch: to call about twice a second while waiting for other ranks; raises if one of them has failed.
    """

    rank: int
    world: int
    session: str
    timeout_s: float
    device: int | None = None
    stream: int = 0
    relieve: Relieve = nothing_to_give
    watch: Watch = nothing_to_watch


Buffer = Any
"""Bytes in the transport's kind of memory, as returned by its `empty`; supports slicing."""


@runtime_checkable
class Transport(Protocol):
    """A transport that sends and receives messages.

    A GPU transport whose `exchange` waits for the messages on the host, instead of enqueueing them in the order of the caller's stream,
    sets an attribute `waits = True`; its `exchange` is then called from a separate thread.

    A transport with resources to release has a method `end(idle)`, which `Exchanger.close` calls. `idle` is false after a failed run, when
    a peer may still be waiting and `exchange` may still be running in another thread.
    """

    rank: int

    def empty(self, nbytes: int) -> Buffer:
        """Return a new uint8 message buffer in memory from which this transport can send."""

    def exchange(self, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]], timeout_s: float) -> None:
        """Send each buffer of `sends` to its rank and fill each of `receives` from its rank; at most one message per pair and direction.

        Return when all buffers may be reused. Called from one thread at a time, not necessarily the main thread.

        Raises:
            asyncmoe.errors.WaitTimeout: names the rank that did not take part in time.
        """


@runtime_checkable
class PostingTransport(Transport, Protocol):
    """A transport that can have several rounds of messages in flight, so that a link is never idle between two rounds."""

    def post(self, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]]) -> Callable[[float], None]:
        """Start an `exchange`; messages of a pair of ranks arrive in the order in which they were posted.

        Returns:
            A function of `timeout_s` that completes the exchange, and returns or raises as `exchange`; called in another thread, in posting
            order.

        Raises:
            asyncmoe.errors.TransferError: a rank is gone.
        """


@dataclass(frozen=True)
class Lane:
    """One direction between this rank and a peer.

    Attributes:
        peer: the other rank.
        message_bytes: size of each message, in order.
        slot_bytes: size of a slot, the same on both ends; no message is larger.
    """

    peer: int
    message_bytes: tuple[int, ...]
    slot_bytes: int


class Link(Protocol):
    """The lanes of one exchange, which can run many times. Message n of a lane uses slot `n % slots`; rounds count up from 0.

    In each round a rank packs the message of every outgoing lane, closes the round, and then unpacks the messages of an earlier round.
    """

    device: str
    """Device of all slots: "cpu", or "cuda:0"."""

    def resize(self, outgoing: Sequence[Lane], incoming: Sequence[Lane]) -> None:
        """Set the message sizes for subsequent runs: for each lane, no more messages than before, and none larger than a slot."""

    def pack_into(self, lane: int, number: int, timeout_s: float) -> Buffer:
        """Wait until the slot's previous message is gone; return the buffer for message `number` of an outgoing lane."""

    def post(self, lane: int, number: int) -> None:
        """Mark an outgoing message as complete."""

    def close_round(self, number: int, timeout_s: float) -> None:
        """Mark a round as complete: all its outgoing messages are posted."""

    def unpack_from(self, lane: int, number: int, timeout_s: float) -> Buffer:
        """Wait for message `number` of an incoming lane and return its buffer."""

    def release(self, lane: int, number: int) -> None:
        """Mark an incoming message as read."""

    def finish(self, timeout_s: float) -> None:
        """End a run: wait until every posted message has left this rank's buffers, or lies where its receiver will find it."""

    def close(self) -> None:
        """Release all memory. Waiting peers notice."""


@runtime_checkable
class SharedTransport(Protocol):
    """A transport whose messages lie in memory that both ends can access."""

    rank: int

    def connect(self, outgoing: Sequence[Lane], incoming: Sequence[Lane], slots: int, timeout_s: float) -> Link:
        """Connect to the peers of all lanes.

        Raises:
            asyncmoe.errors.WaitTimeout: names the rank that did not connect in time.
        """


class LocalTransport:
    """A transport for a single process; it carries no messages."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def empty(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def exchange(self, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]], timeout_s: float) -> None:
        others = sorted({rank for rank, _ in (*sends, *receives)})
        if others:
            raise InvariantBroken(f"a plan for ranks {[self.rank, *others]} was given to the transport of one process")


class MessageLink:
    """A link over a `Transport`: a round is one call of its `exchange`, in a separate thread while the calling thread packs and unpacks.

    A `PostingTransport` has up to `slots` rounds in flight: the next is posted before the current one is over, so that the wires stay busy
    while a thread waits for a core, packs or unpacks.

    Rounds of a GPU transport that does not wait are exchanged from the calling thread: it enqueues and returns, and the caller's stream
    orders the messages.

    Args:
        watch: called while another thread exchanges.
    """

    def __init__(
        self,
        transport: Transport,
        outgoing: Sequence[Lane],
        incoming: Sequence[Lane],
        slots: int,
        watch: Watch = nothing_to_watch,
    ) -> None:
        self._watch = watch
        self._transport, self._outgoing, self._incoming, self._slots = transport, outgoing, incoming, slots
        self._out, self._in = (
            [[transport.empty(lane.slot_bytes) for _ in range(min(slots, len(lane.message_bytes)))] for lane in lanes]
            for lanes in (outgoing, incoming)
        )
        buffers = [buffer for lane in (*self._out, *self._in) for buffer in lane]
        self.device = memory_of(buffers[0], "message buffer", write=True).device if buffers else "cpu"
        threaded = buffers and (self.device == "cpu" or getattr(transport, "waits", False))
        self._thread = device_threads.pool(self.device, 1, "exchange") if threaded else None
        self._rounds: dict[int, Future[None]] = {}

    def resize(self, outgoing: Sequence[Lane], incoming: Sequence[Lane]) -> None:
        self._outgoing, self._incoming = outgoing, incoming

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
        elif isinstance(self._transport, PostingTransport):
            try:
                complete = self._transport.post(sends, receives)
            except AsyncmoeError:
                self.finish(timeout_s)  # an earlier round has failed, and its error names the peer
                raise
            self._rounds[number] = self._thread.submit(complete, timeout_s)
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
        """Wait until a round is over; the transport's own timeout limits the wait."""
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
