"""Messages between GPUs over NCCL, with separate communicators and streams; needs NVIDIA's NCCL at run time, but not torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

from asyncmoe.errors import InvariantBroken, TransferError, WaitTimeout
from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.memory import DeviceBuffer
from asyncmoe.reshard.nccl import Communicator
from asyncmoe.reshard.transport import Watch, nothing_to_watch

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

T = TypeVar("T")

_LOOK_S = 0.25
"""Seconds between two checks for NCCL's asynchronous errors, and between two calls of a `Watch`."""


@dataclass(frozen=True, eq=False)
class Route:
    """A communicator and the peers it reaches.

    Attributes:
        numbers: rank in the transport -> rank in the communicator.
    """

    communicator: Communicator
    numbers: Mapping[int, int]


class RoutedTransport:
    """See `asyncmoe.reshard.Transport`. An exchange is one group of sends and receives on each communicator that has messages.

    An exchange is ordered after the work already enqueued on `stream`. The calling thread waits for it without the GIL, so that a dead
    peer ends it. Every communicator has its own stream, and nothing is enqueued behind messages under way, so kernels of one communicator
    never wait for another communicator's, in any order of launches on the ranks, as long as all kernels fit on the device together
    (`Communicator`'s `max_ctas`). After an error all communicators are aborted.

    Args:
        rank: this process's rank.
        stream: the `Exchanger`'s stream, a cudaStream_t as an integer.
        routes: every peer must be in one of them. The caller owns the communicators: `end` does not close idle ones.
    """

    waits = True

    def __init__(self, rank: int, gpu: Gpu, routes: Sequence[Route], *, stream: int = 0) -> None:
        self.rank, self._gpu, self._routes, self._stream = rank, gpu, tuple(routes), stream
        self._before = gpu.event()
        self._place = f"{gpu.device} of {socket.gethostname()}"
        self.ended = False

    def empty(self, nbytes: int) -> DeviceBuffer:
        return self._gpu.allocate(nbytes)

    def join(self, timeout_s: float, watch: Watch = nothing_to_watch) -> None:
        """Wait until the ranks of all communicators have joined.

        Raises:
            TransferError: NCCL failed.
            WaitTimeout: not all ranks joined in time.
        """
        until = time.monotonic() + timeout_s
        for route in self._routes:
            others = [rank for rank in route.numbers if rank != self.rank] or [self.rank]
            self._wait(route.communicator.idle, others, "it to join the communicator", until, watch)

    def exchange(self, sends: Sequence[tuple[int, DeviceBuffer]], receives: Sequence[tuple[int, DeviceBuffer]], timeout_s: float) -> None:
        """As `Transport.exchange`.

        Raises:
            TransferError: NCCL failed, or detected that a peer is gone; names this process's device.
            WaitTimeout: a peer made no progress in time; names all peers of this exchange on that communicator.
        """
        if self.ended:
            raise InvariantBroken(f"rank {self.rank}: an NCCL communicator that had ended was used; make a new one")
        busy = []
        until = time.monotonic() + timeout_s
        with self._gpu.current():
            self._before.record(self._stream)
            for route in self._routes:
                out, into = _over(route, sends), _over(route, receives)
                if not out and not into:
                    continue
                peers = sorted({rank for rank, _ in (*sends, *receives) if rank in route.numbers})
                busy.append((route.communicator, peers))
                self._attempt(partial(route.communicator.post, out, into, self._before), peers)
            for link, peers in busy:
                self._wait(link.enqueued, peers, "it to take part in an exchange", until)
            for link, peers in busy:
                self._wait(link.passed, peers, "its messages", until)

    def end(self, idle: bool, runs: int = 0) -> None:
        """Called by `Exchanger.close` with the number of successful runs. Unless idle, abort all communicators."""
        if not idle:
            self._abort()
        if not self.ended:
            for route in self._routes:
                route.communicator.runs += runs
        self.ended = True

    def _wait(self, done: Callable[[float], bool], peers: Sequence[int], what: str, until: float, watch: Watch = nothing_to_watch) -> None:
        started = time.monotonic()
        while not self._attempt(lambda: done(max(0.0, min(_LOOK_S, until - time.monotonic()))), peers):
            try:
                watch()
            except Exception:
                self._abort()
                raise
            if (now := time.monotonic()) >= until:
                self._abort()
                names = ", ".join(str(rank) for rank in peers)
                raise WaitTimeout(f"rank{'s' * (len(peers) > 1)} {names}", what, now - started)

    def _attempt(self, act: Callable[[], T], peers: Sequence[int]) -> T:
        try:
            return act()
        except RuntimeError as error:
            self._fail(peers, error)

    def _fail(self, peers: Sequence[int], error: RuntimeError) -> NoReturn:
        self._abort()
        where = f"on {self._place}, exchanging with ranks {', '.join(map(str, peers))}"
        raise TransferError(self.rank, peers[0], f"{error} ({where})") from error

    def _abort(self) -> None:
        self.ended = True
        for route in self._routes:
            if not route.communicator.ended:
                route.communicator.abort()


class NcclTransport(RoutedTransport):
    """A transport that owns one communicator of all ranks.

    Args:
        rank, world, unique_id, max_ctas, library: as for `Communicator`.
        device: number of this process's GPU.
        stream: as for `RoutedTransport`.
        timeout_s: how long to wait for all ranks to join.

    Raises:
        UserError: no usable NCCL was found, or the GPU does not exist.
        TransferError: NCCL failed.
        WaitTimeout: not all ranks joined in time.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        unique_id: bytes,
        device: int,
        *,
        stream: int = 0,
        timeout_s: float = 300.0,
        max_ctas: int = 0,
        library: str | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        gpu = gpu or Gpu(device)
        others = [other for other in range(world) if other != rank] or [rank]
        try:
            self._owned = Communicator(gpu, rank, world, unique_id, max_ctas=max_ctas, library=library)
        except RuntimeError as error:
            raise TransferError(rank, others[0], f"{error} (on {gpu.device})") from error
        super().__init__(rank, gpu, [Route(self._owned, {other: other for other in range(world)})], stream=stream)
        self.join(timeout_s)

    def end(self, idle: bool, runs: int = 0) -> None:
        super().end(idle, runs)
        self._owned.close()

    def close(self) -> None:
        """End the communicator, unless an error has already ended it."""
        self.end(True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end(error is None)


def _over(route: Route, messages: Sequence[tuple[int, DeviceBuffer]]) -> list[tuple[int, DeviceBuffer]]:
    return [(route.numbers[rank], buffer) for rank, buffer in messages if rank in route.numbers]
