"""Messages between GPUs over a communicator and a stream of their own; needs NVIDIA's NCCL at run time, and no torch."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, TransferError, UserError, WaitTimeout
from asyncmoe.reshard.gpu import Gpu, poll
from asyncmoe.reshard.memory import DeviceBuffer

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

T = TypeVar("T")

SONAME = "libnccl.so.2"
_SUCCESS, _IN_PROGRESS = 0, 7
"""Results of `NcclCommunicator.state` (ncclResult_t)."""


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


class NcclTransport:
    """See `asyncmoe.reshard.Transport`. An exchange is one group of sends and receives.

    It is ordered behind what was enqueued on `stream` when it begins, and the calling thread waits until it is over, so that a
    peer that is gone ends it. After an error the communicator is aborted and cannot be used again.

    Args:
        rank, world: this process's number, and how many there are. NCCL refuses two of them on one GPU.
        unique_id: from `make_unique_id`, the same for all ranks.
        device: number of this process's GPU.
        stream: that of the `Exchanger`, a cudaStream_t as an integer.
        timeout_s: how long to wait for all ranks to meet.
        library: path of libnccl; None: `find_nccl()`.

    Raises:
        UserError: there is no usable NCCL, or no such GPU.
        TransferError: NCCL failed.
        WaitTimeout: not all ranks were there in time.
    """

    waits = True

    def __init__(
        self,
        rank: int,
        world: int,
        unique_id: bytes,
        device: int,
        *,
        stream: int = 0,
        timeout_s: float = 300.0,
        library: str | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        self.rank, self._stream = rank, stream
        _opened(library, _C.nccl_version)
        self._gpu = gpu or Gpu(device)
        others = [other for other in range(world) if other != rank] or [rank]
        self._closed = False
        with self._gpu.current():
            self._wire, self._before, self._after = self._gpu.stream(), self._gpu.event(), self._gpu.event()
            try:
                self._communicator = _C.NcclCommunicator(library or find_nccl(), rank, world, unique_id)
            except RuntimeError as error:
                raise TransferError(rank, others[0], str(error)) from error
            self._wait(lambda: True, others, "it to join the communicator", timeout_s)

    def empty(self, nbytes: int) -> DeviceBuffer:
        return self._gpu.allocate(nbytes)

    def exchange(self, sends: Sequence[tuple[int, DeviceBuffer]], receives: Sequence[tuple[int, DeviceBuffer]], timeout_s: float) -> None:
        """As `Transport.exchange`.

        Raises:
            TransferError: NCCL failed, or noticed that a peer is gone.
            WaitTimeout: a peer made no progress in time; names all peers of this exchange.
        """
        if self._closed:
            raise InvariantBroken(f"rank {self.rank}: an NCCL communicator that had ended was used; make a new one")
        if not sends and not receives:
            return
        peers = sorted({rank for rank, _ in (*sends, *receives)})
        with self._gpu.current():
            self._before.record(self._stream)
            self._before.hold(self._wire.handle)
            try:
                self._communicator.exchange(_messages(sends), _messages(receives), self._wire.handle)
            except RuntimeError as error:
                self._fail(peers, str(error), error)
            started = time.monotonic()
            self._wait(lambda: True, peers, "it to take part in an exchange", timeout_s)  # not on the stream before that
            self._after.record(self._wire.handle)
            self._wait(self._after.done, peers, "its messages", max(0.0, started + timeout_s - time.monotonic()))

    def close(self) -> None:
        """End the communicator; after an error it has ended already."""
        if not self._closed:
            self._closed = True
            with self._gpu.current():
                self._communicator.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _wait(self, done: Callable[[], bool], peers: Sequence[int], what: str, timeout_s: float) -> None:
        """Until NCCL is idle and `done`."""

        def over() -> bool:
            state = self._communicator.state()
            if state not in (_SUCCESS, _IN_PROGRESS):
                self._fail(peers, f"NCCL: {self._communicator.describe(state)}", None)
            return state == _SUCCESS and done()

        started = time.monotonic()
        try:
            finished = poll(over, timeout_s)
        except RuntimeError as error:
            self._fail(peers, str(error), error)
        if not finished:
            self._abort()
            names = ", ".join(str(rank) for rank in peers)
            raise WaitTimeout(f"rank{'s' * (len(peers) > 1)} {names}", what, time.monotonic() - started)

    def _fail(self, peers: Sequence[int], what: str, cause: Exception | None) -> None:
        self._abort()
        raise TransferError(self.rank, peers[0], f"{what} (exchanging with ranks {', '.join(map(str, peers))})") from cause

    def _abort(self) -> None:
        self._closed = True
        self._communicator.abort()


def _messages(given: Sequence[tuple[int, DeviceBuffer]]) -> list[tuple[int, int, int]]:
    return [(rank, buffer.address, buffer.nbytes) for rank, buffer in given]


def _opened(library: str | None, call: Callable[[str], T]) -> T:
    path = library or find_nccl()
    try:
        return call(path)
    except RuntimeError as error:
        cure = "install nvidia-nccl-cu13 (or -cu12), or put the library's directory on LD_LIBRARY_PATH"
        raise UserError(f"NCCL ({path})", got=str(error), expected="NVIDIA's NCCL 2.14 or later", cure=cure) from error
