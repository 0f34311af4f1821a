"""Messages between GPUs over NCCL, with separate communicators and streams; needs NVIDIA's NCCL at run time, but not torch."""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, TransferError, UserError, WaitTimeout
from asyncmoe.reshard.gpu import Event, Gpu
from asyncmoe.reshard.memory import DeviceBuffer
from asyncmoe.reshard.transport import Watch, nothing_to_watch

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

T = TypeVar("T")

SONAME = "libnccl.so.2"
_SUCCESS, _IN_PROGRESS = 0, 7
"""Results of `NcclCommunicator.state` (ncclResult_t)."""
_LOOK_S = 0.25
"""Seconds between two checks for NCCL's asynchronous errors, and between two calls of a `Watch`."""


@dataclass(frozen=True)
class Origin:
    """The NCCL that this process uses.

    Attributes:
        version: NCCL_VERSION_CODE, such as 22803 for 2.28.3.
        path: the file it was loaded from.
    """

    version: int
    path: str

    @property
    def words(self) -> str:
        """The version as "2.28.3"."""
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"


def origin(library: str | None = None) -> Origin:
    """Return the NCCL that this process's communicators use.

    Raises:
        UserError: no usable NCCL was found.
    """
    return Origin(*_opened(library, _C.nccl_origin))


def find_nccl() -> str:
    """Return the path of NCCL as installed by pip, else its name for the system's loader, which also finds a copy loaded by torch."""
    package = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = list(package.submodule_search_locations or []) if package else []
    found = [str(path) for folder in folders if (path := Path(folder, "lib", SONAME)).exists()]
    return found[0] if found else SONAME


def make_unique_id(library: str | None = None) -> bytes:
    """Return a new NCCL unique ID (128 bytes), which one rank creates and passes to all ranks of a communicator.

    Raises:
        UserError: no usable NCCL was found.
    """
    return _opened(library, _C.nccl_unique_id)


class Communicator:
    """An NCCL communicator with its own stream; ranks are numbered from 0. At most one group of messages is under way.

    The constructor starts to join; `idle` returns true once all ranks have joined. Any thread may call `abort`.

    Args:
        rank, world: this process's rank, and the number of ranks. NCCL refuses two ranks on one GPU.
        unique_id: from `make_unique_id`, the same on all ranks.
        max_ctas: maximum number of multiprocessors a transfer uses; 0: NCCL's choice, up to 32. The same on all ranks.
        library: path of libnccl; None: `find_nccl()`.

    Attributes:
        ended: the communicator cannot be used any more.
        runs: number of successful runs of closed exchangers on this rank; if it differs between ranks, the communicator may contain
            messages that were sent but not received.

    Raises:
        UserError: no usable NCCL was found.
        RuntimeError: NCCL failed; all methods raise it, too.
    """

    def __init__(self, gpu: Gpu, rank: int, world: int, unique_id: bytes, *, max_ctas: int = 0, library: str | None = None) -> None:
        origin(library)
        self.rank, self._gpu = rank, gpu
        self.ended, self.runs = False, 0
        with gpu.current():
            self._wire, self._after = gpu.stream(), gpu.event()
            self._handle = _C.NcclCommunicator(library or find_nccl(), rank, world, unique_id, max_ctas)

    def idle(self, timeout_s: float) -> bool:
        """Return whether NCCL finished its work on the host (joining, enqueueing) in time."""
        state = self._handle.wait(timeout_s)
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise RuntimeError(f"NCCL: {self._handle.describe(state)}")
        return state == _SUCCESS

    def post(self, sends: Sequence[tuple[int, DeviceBuffer]], receives: Sequence[tuple[int, DeviceBuffer]], behind: Event) -> None:
        """Enqueue messages as one group, after an event."""
        behind.hold(self._wire.handle)
        self._handle.exchange(_messages(sends), _messages(receives), self._wire.handle)

    def enqueued(self, timeout_s: float) -> bool:
        """Return whether the posted messages were enqueued on the stream in time."""
        if not self.idle(timeout_s):
            return False
        self._after.record(self._wire.handle)
        return True

    def passed(self, timeout_s: float) -> bool:
        """Return whether the enqueued messages finished in time."""
        arrived = self._after.wait(timeout_s)
        return self.idle(0.0) and arrived  # NCCL may have noticed that a peer is gone

    def abort(self) -> None:
        """End the communicator and any messages under way at once, without waiting for a peer."""
        self.ended = True
        self._handle.abort()

    def close(self) -> None:
        """End the communicator. No messages may be under way."""
        if not self.ended:
            self.ended = True
            with self._gpu.current():
                self._handle.destroy()


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
        """Called by `Exchanger.close` with the number of successful runs. Unless idle, abort all communicators and their messages."""
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


def _messages(given: Sequence[tuple[int, DeviceBuffer]]) -> list[tuple[int, int, int]]:
    return [(rank, buffer.address, buffer.nbytes) for rank, buffer in given]


def _opened(library: str | None, call: Callable[[str], T]) -> T:
    path = library or find_nccl()
    try:
        return call(path)
    except RuntimeError as error:
        hint = "install nvidia-nccl-cu13 (or -cu12), or put the library's directory on LD_LIBRARY_PATH"
        raise UserError(f"NCCL ({path})", got=str(error), expected="NVIDIA's NCCL 2.14 or later", hint=hint) from error
