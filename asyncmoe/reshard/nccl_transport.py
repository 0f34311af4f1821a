"""Messages between GPUs over NCCL, with its own communicator and stream; needs NVIDIA's NCCL at run time, but not torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, TransferError, WaitTimeout
from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.memory import DeviceBuffer
from asyncmoe.reshard.nccl import find_nccl, origin
from asyncmoe.reshard.transport import Watch, nothing_to_watch

T = TypeVar("T")

_LOOK_S = 0.25
"""Seconds between two checks for NCCL's asynchronous errors, and between two calls of a `Watch`."""
_SUCCESS, _IN_PROGRESS = 0, 7
"""Results of `NcclCommunicator.wait` (ncclResult_t)."""


class NcclTransport:
    """See `asyncmoe.reshard.Transport`. An exchange is one group of sends and receives on a communicator of all ranks.

    An exchange is ordered after the work already enqueued on `stream`. The calling thread waits for the exchange without the GIL, and a
    dead peer ends the wait. Nothing is enqueued behind messages in flight. After an error the communicator is aborted, because a peer that
    did not notice the failure may have sent messages that no rank received.

    Args:
        rank, world: this process's rank, and the number of ranks. NCCL refuses two ranks on one GPU.
        unique_id: from `asyncmoe.reshard.nccl.make_unique_id`, the same on all ranks.
        device: number of this process's GPU.
        stream: the `Exchanger`'s stream, a cudaStream_t as an integer.
        timeout_s: how long to wait for all ranks to join.
        max_ctas: maximum number of multiprocessors that a transfer uses; 0: NCCL's choice, up to 32. The same on all ranks.
        library: path of libnccl; None: `asyncmoe.reshard.nccl.find_nccl()`.
        watch: called about every 0.25 s while waiting for the ranks to join.

    Raises:
        UserError: no usable NCCL was found, or the GPU does not exist.
        TransferError: NCCL failed.
        WaitTimeout: not all ranks joined in time.
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
        max_ctas: int = 0,
        library: str | None = None,
        gpu: Gpu | None = None,
        watch: Watch = nothing_to_watch,
    ) -> None:
        origin(library)  # refuses a library that is too old
        self.rank, self._stream, self._gpu = rank, stream, gpu or Gpu(device)
        self._place = f"{self._gpu.device} of {socket.gethostname()}"
        self._before, self._ended = self._gpu.event(), False
        others = [other for other in range(world) if other != rank] or [rank]
        with self._gpu.current():
            self._wire, self._after = self._gpu.stream(), self._gpu.event()
            try:
                self._handle = _C.NcclCommunicator(library or find_nccl(), rank, world, unique_id, max_ctas)
            except RuntimeError as error:
                raise TransferError(rank, others[0], f"{error} (on {self._gpu.device})") from error
        self._wait(self._idle, others, "to join the communicator", time.monotonic() + timeout_s, watch)

    def empty(self, nbytes: int) -> DeviceBuffer:
        return self._gpu.allocate(nbytes)

    def exchange(self, sends: Sequence[tuple[int, DeviceBuffer]], receives: Sequence[tuple[int, DeviceBuffer]], timeout_s: float) -> None:
        """As `Transport.exchange`.

        Raises:
            TransferError: NCCL failed, or detected that a peer is gone; names this process's device.
            WaitTimeout: a peer made no progress in time; names all peers in this exchange.
        """
        if self._ended:
            raise InvariantBroken(f"rank {self.rank}: an NCCL communicator that had ended was used; make a new one")
        peers = sorted({rank for rank, _ in (*sends, *receives)})
        if not peers:
            return
        until = time.monotonic() + timeout_s
        with self._gpu.current():
            self._before.record(self._stream)
            self._before.hold(self._wire.handle)
            self._attempt(lambda: self._handle.exchange(_messages(sends), _messages(receives), self._wire.handle), peers)
            self._wait(self._idle, peers, "to take part in an exchange", until)
            self._after.record(self._wire.handle)
            self._wait(self._passed, peers, "its messages", until)

    def end(self, idle: bool) -> None:
        """Called by `Exchanger.close`, from any thread. Unless `idle`, abort messages in flight at once, without waiting for a peer."""
        if self._ended:
            return
        self._ended = True
        if idle:
            with self._gpu.current():
                self._handle.destroy()
        else:
            self._handle.abort()

    def _idle(self, timeout_s: float) -> bool:
        """Return whether NCCL finished its work on the host (joining, enqueueing) in time."""
        state = self._handle.wait(timeout_s)
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise RuntimeError(f"NCCL: {self._handle.describe(state)}")
        return state == _SUCCESS

    def _passed(self, timeout_s: float) -> bool:
        """Return whether the enqueued messages finished in time."""
        arrived = self._after.wait(timeout_s)
        return self._idle(0.0) and arrived  # NCCL may have noticed that a peer is gone

    def _wait(self, done: Callable[[float], bool], peers: Sequence[int], what: str, until: float, watch: Watch = nothing_to_watch) -> None:
        started = time.monotonic()
        while not self._attempt(lambda: done(max(0.0, min(_LOOK_S, until - time.monotonic()))), peers):
            try:
                watch()
            except Exception:
                self.end(False)
                raise
            if (now := time.monotonic()) >= until:
                self.end(False)
                names = ", ".join(str(rank) for rank in peers)
                raise WaitTimeout(f"rank{'s' * (len(peers) > 1)} {names}", what, now - started)

    def _attempt(self, act: Callable[[], T], peers: Sequence[int]) -> T:
        try:
            return act()
        except RuntimeError as error:
            self.end(False)
            where = f"on {self._place}, exchanging with ranks {', '.join(map(str, peers))}"
            raise TransferError(self.rank, peers[0], f"{error} ({where})") from error


def _messages(given: Sequence[tuple[int, DeviceBuffer]]) -> list[tuple[int, int, int]]:
    return [(rank, buffer.address, buffer.nbytes) for rank, buffer in given]
