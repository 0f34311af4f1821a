"""Execute both rounds of a relay concurrently: a replica forwards a message as soon as the data it consists of has arrived."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from asyncmoe.errors import InvariantBroken, LayoutError
from asyncmoe.reshard import device_threads
from asyncmoe.reshard.arrival import latest, spans
from asyncmoe.reshard.carry import Take
from asyncmoe.reshard.chunks import Chunks, at_the_end
from asyncmoe.reshard.exchange import BUCKET_BYTES, Exchanger, _device
from asyncmoe.reshard.gpu import Relieve, nothing_to_give
from asyncmoe.reshard.memory import Array
from asyncmoe.reshard.moved import Moved
from asyncmoe.reshard.plan import DESTINATION, DESTINATION_OFFSET, DESTINATION_STRIDES, SOURCE, SOURCE_OFFSET, SOURCE_STRIDES, Plan
from asyncmoe.reshard.transport import SharedTransport, Transport, Watch, nothing_to_watch

_ALL = 1 << 62


class RelayExchanger:
    """This rank's part of the rounds planned by `asyncmoe.reshard.relay`; otherwise as `Exchanger`.

    The second round runs in a separate thread, concurrently with the first and with its own message buffers, so a rank has up to
    `2 * buffers * bucket_bytes` of them. The second round is empty on ranks that are only sources.

    Args:
        plans: the result of `relay`, one round or two.
        transports: this rank's transport for each plan. Both are used at the same time, so their messages must be separate: two sessions of
            shared memory, or two process groups.
        bucket_bytes, buffers, timeout_s, threads, stream, relieve, watch: as for `Exchanger`; `watch` is called in several threads.

    Raises:
        LayoutError: the numbers of transports and plans differ; or as `Exchanger`.
        WaitTimeout: as `Exchanger`.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        transports: Sequence[Transport | SharedTransport],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        buffers: int = 2,
        timeout_s: float = 300.0,
        threads: int = 0,
        stream: int = 0,
        relieve: Relieve = nothing_to_give,
        watch: Watch = nothing_to_watch,
    ) -> None:
        if len(plans) != len(transports) or not 1 <= len(plans) <= 2:
            raise LayoutError(
                "transports of a relay", got=f"{len(transports)} for {len(plans)} plans", expected="one for each plan, 1 or 2"
            )
        options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "buffers": buffers, "threads": threads, "stream": stream}
        options |= {"timeout_s": timeout_s, "relieve": relieve, "watch": watch}
        self._first = _Receiving(plans[0], transports[0], **options)
        self._first.progress = _Progress()
        self._second: _Forwarding | None = None
        if len(plans) == 2:
            self._second = _Forwarding(plans[1], transports[1], **options)
            self._second.needs = needed_rounds(plans, self._first.rank, self._first.incoming, self._second.outgoing)
        self._thread = device_threads.pool(_device(self._second._message_memories()), 1, "relay") if self._second else None
        self.rank = self._first.rank
        self.buffer_bytes = self._first.buffer_bytes + (self._second.buffer_bytes if self._second else 0)
        """Bytes of this rank's message buffers."""

    def bind(self, source_arrays: Mapping[str, Array] | None = None, destination_arrays: Mapping[str, Array] | None = None) -> None:
        """As `Exchanger.bind`."""
        self._first.bind(source_arrays, destination_arrays)
        if self._second:
            self._second.bind(destination_arrays, destination_arrays)

    def run(self, timeout_s: float | None = None) -> Moved:
        """As `Exchanger.run`. The seconds of both rounds are added; the rounds overlap, so the sum may exceed the duration of the run."""
        if self._second is None or self._thread is None:
            return self._first.run(timeout_s)
        progress = _Progress()
        self._first.progress = self._second.progress = progress
        second = self._thread.submit(self._second.run, timeout_s)
        try:
            moved = self._first.run(timeout_s)
        except BaseException as error:
            progress.fail(error)
            second.exception()  # wait for its thread, which writes the same arrays; its own timeout bounds it
            raise
        progress.advance(_ALL)
        return _sum(moved, second.result())

    def open_carrier(self, destinations: Sequence[int] | None = None, sources: Sequence[int] | None = None) -> None:
        """As `Exchanger.open_carrier`; messages go over the transport of the first round."""
        self._first.open_carrier(destinations, sources)

    def carry(
        self, outgoing: Mapping[int, Sequence[np.ndarray]], incoming: Mapping[int, Sequence[int]], take: Take, timeout_s: float
    ) -> None:
        """As `Exchanger.carry`."""
        self._first.carry(outgoing, incoming, take, timeout_s)

    def close(self) -> None:
        """Free the message buffers."""
        if self._thread is not None:
            self._thread.shutdown()
        for exchanger in (self._first, self._second):
            if exchanger is not None:
                exchanger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


AnyExchanger = Exchanger | RelayExchanger
"""What executes a plan, or both of a relay."""


class _Progress:
    """The number of message rounds the first exchange has unpacked."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = 0
        self._error: BaseException | None = None

    def advance(self, done: int) -> None:
        with self._changed:
            self._done = max(self._done, done)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, needed: int) -> None:
        """Wait until `needed` rounds are done. The first exchange reaches that number or fails within its own timeouts."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= needed or self._error is not None)
            if self._error is not None:
                raise InvariantBroken("the first exchange failed; nothing to forward") from self._error


class _Receiving(Exchanger):
    progress: _Progress

    @property
    def incoming(self) -> list[Chunks]:
        return self._incoming

    def _unpack_round(self, number: int, moved: Moved) -> None:
        super()._unpack_round(number, moved)
        self.progress.advance(number + 1)


class _Forwarding(Exchanger):
    progress: _Progress
    needs: list[int]

    @property
    def outgoing(self) -> list[Chunks]:
        return self._outgoing

    def _cut(self, chunks: Chunks, rounds: int) -> Chunks:
        """Let few messages go last, when all that they consist of has arrived: a message delays all others of its round."""
        return at_the_end(chunks, rounds)

    def _pack_round(self, number: int, moved: Moved) -> None:
        if number < len(self.needs):
            with moved.timed("wire"):
                self.progress.wait(self.needs[number])
        super()._pack_round(number, moved)

    def _copy_local(self, moved: Moved) -> None:
        if self._local is not None:
            with moved.timed("wire"):
                self.progress.wait(_ALL)
        super()._copy_local(moved)


def needed_rounds(plans: Sequence[Plan], rank: int, incoming: Sequence[Chunks], outgoing: Sequence[Chunks]) -> list[int]:
    """Return how many rounds of `incoming` messages a rank must have unpacked before it can pack each round of `outgoing` messages.

    An upper bound, not always the minimum: a box counts as all bytes from its first to its last.

    Args:
        plans: the two rounds of a relay.
        incoming: messages of the first plan to `rank`.
        outgoing: messages of the second plan from `rank`.
    """
    wanted = plans[0].destinations.get(rank, {})
    begin = dict(zip(wanted, np.cumsum([0, *(storage.nbytes for storage in wanted.values())]).tolist(), strict=False))
    written = spans(incoming, begin, wanted, (DESTINATION, DESTINATION_OFFSET, DESTINATION_STRIDES))
    read = spans(outgoing, begin, plans[1].sources.get(rank, {}), (SOURCE, SOURCE_OFFSET, SOURCE_STRIDES))
    needs = np.ones(max((len(chunks) for chunks in outgoing), default=0), np.int64)  # 1: local copies precede the first unpacking
    np.maximum.at(needs, read[:, 2], latest(written, read))
    return np.maximum.accumulate(needs).tolist() if len(written) else [_ALL] * len(needs)


def _sum(first: Moved, second: Moved) -> Moved:
    seconds = {phase: first.seconds[phase] + second.seconds[phase] for phase in first.seconds}
    return Moved(first.sent + second.sent, first.received + second.received, first.local + second.local, seconds)
