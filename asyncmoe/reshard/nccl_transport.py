"""Messages between GPUs over NCCL communicators and streams of their own; needs NVIDIA's NCCL at run time, and no torch."""

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
"""Between two looks at NCCL's own errors, and two calls of a `Watch`."""


@dataclass(frozen=True)
class Origin:
    """The NCCL that this process uses.

    Attributes:
        version: NCCL_VERSION_CODE, 22803 for 2.28.3.
        path: the file it was loaded from.
    """

    version: int
    path: str

    @property
    def words(self) -> str:
        """The version as people write it."""
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"


def origin(library: str | None = None) -> Origin:
    """What communicators of this process are made with.

    Raises:
        UserError: there is no usable NCCL.
    """
    return Origin(*_opened(library, _C.nccl_origin))


def find_nccl() -> str:
    """Where pip put NCCL, else its name for the system's loader, which also finds one that torch has loaded."""
    package = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = list(package.submodule_search_locations or []) if package else []
    found = [str(path) for folder in folders if (path := Path(folder, "lib", SONAME)).exists()]
    return found[0] if found else SONAME


def make_unique_id(library: str | None = None) -> bytes:
    """128 bytes that one rank makes and every rank of a communicator is given.

    Raises:
        UserError: there is no usable NCCL.
    """
    return _opened(library, _C.nccl_unique_id)


class Communicator:
    """One communicator: its ranks, numbered from 0, on a stream of its own. It has at most one group of messages under way.

    Making one begins to meet the others; `joined` tells when they are there. Any thread may `abort` it.

    Args:
        rank, world: this process's number, and how many there are. NCCL refuses two of them on one GPU.
        unique_id: from `make_unique_id`, the same for all ranks.
        max_ctas: multiprocessors that a transfer takes at most; 0: up to 32 of them, by NCCL's own choice. The same on all ranks.
        library: path of libnccl; None: `find_nccl()`.

    Attributes:
        ended: it cannot be used any more.
        runs: of exchangers that are closed, how many went well here; on ranks whose numbers differ, messages may lie in it untaken.

    Raises:
        UserError: there is no usable NCCL.
        RuntimeError: NCCL failed; so does all else here.
    """

    def __init__(self, gpu: Gpu, rank: int, world: int, unique_id: bytes, *, max_ctas: int = 0, library: str | None = None) -> None:
        origin(library)
        self.rank, self._gpu = rank, gpu
        self.ended, self.runs = False, 0
        with gpu.current():
            self._wire, self._after = gpu.stream(), gpu.event()
            self._handle = _C.NcclCommunicator(library or find_nccl(), rank, world, unique_id, max_ctas)

    def idle(self, timeout_s: float) -> bool:
        """Whether NCCL has done, in time, what it does on the host."""
        state = self._handle.wait(timeout_s)
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise RuntimeError(f"NCCL: {self._handle.describe(state)}")
        return state == _SUCCESS

    def post(self, sends: Sequence[tuple[int, DeviceBuffer]], receives: Sequence[tuple[int, DeviceBuffer]], behind: Event) -> None:
        """Enqueue messages as one group, behind an event."""
        behind.hold(self._wire.handle)
        self._handle.exchange(_messages(sends), _messages(receives), self._wire.handle)

    def enqueued(self, timeout_s: float) -> bool:
        """Whether what was posted is on the stream in time."""
        if not self.idle(timeout_s):
            return False
        self._after.record(self._wire.handle)
        return True

    def passed(self, timeout_s: float) -> bool:
        """Whether what was enqueued is done in time."""
        arrived = self._after.wait(timeout_s)
        return self.idle(0.0) and arrived  # NCCL may have noticed that a peer is gone

    def abort(self) -> None:
        """End it at once, with what is under way; waits for no peer."""
        self.ended = True
        self._handle.abort()

    def close(self) -> None:
        """End it when nothing is under way."""
        if not self.ended:
            self.ended = True
            with self._gpu.current():
                self._handle.destroy()


@dataclass(frozen=True, eq=False)
class Route:
    """Peers that are reached over one communicator.

    Attributes:
        numbers: rank of a transport -> rank in the communicator.
    """

    communicator: Communicator
    numbers: Mapping[int, int]


class RoutedTransport:
    """See `asyncmoe.reshard.Transport`. An exchange is one group of sends and receives on each communicator that has any.

    It is ordered behind what was enqueued on `stream` when it begins, and the calling thread waits, without the interpreter's lock,
    until it is over, so that a peer that is gone ends it. Every communicator has a stream of its own, and nothing is enqueued behind
    messages that are under way: so kernels of one never wait for those of another, in whatever order ranks come to them, as long as
    all of them have room on the device together (`Communicator`'s `max_ctas`). After an error all its communicators are aborted.

    Args:
        rank: this process's.
        stream: that of the `Exchanger`, a cudaStream_t as an integer.
        routes: every peer is in one of them. The communicators are the caller's: `end` leaves those that are idle to it.
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
        """Return when the ranks of all communicators have met.

        Raises:
            TransferError: NCCL failed.
            WaitTimeout: not all ranks were there in time.
        """
        until = time.monotonic() + timeout_s
        for route in self._routes:
            others = [rank for rank in route.numbers if rank != self.rank] or [self.rank]
            self._wait(route.communicator.idle, others, "it to join the communicator", until, watch)

    def exchange(self, sends: Sequence[tuple[int, DeviceBuffer]], receives: Sequence[tuple[int, DeviceBuffer]], timeout_s: float) -> None:
        """As `Transport.exchange`.

        Raises:
            TransferError: NCCL failed, or noticed that a peer is gone; names this process's device.
            WaitTimeout: a peer made no progress in time; names all peers of this exchange over that communicator.
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
        """Called by `Exchanger.close`, after so many runs. Unless idle, what is under way ends, and all communicators with it."""
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
    """A transport with one communicator of all ranks, which it owns.

    Args:
        rank, world, unique_id, max_ctas, library: as for `Communicator`.
        device: number of this process's GPU.
        stream: as for `RoutedTransport`.
        timeout_s: how long to wait for all ranks to meet.

    Raises:
        UserError: there is no usable NCCL, or no such GPU.
        TransferError: NCCL failed.
        WaitTimeout: not all ranks were there in time.
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
        """End the communicator; after an error it has ended already."""
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
        cure = "install nvidia-nccl-cu13 (or -cu12), or put the library's directory on LD_LIBRARY_PATH"
        raise UserError(f"NCCL ({path})", got=str(error), expected="NVIDIA's NCCL 2.14 or later", cure=cure) from error
