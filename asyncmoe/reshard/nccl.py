"""NVIDIA's NCCL as this process finds it at run time, without torch, and its communicators."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import asyncmoe.reshard._C as _C
from asyncmoe.errors import UserError
from asyncmoe.reshard.gpu import Event, Gpu
from asyncmoe.reshard.memory import DeviceBuffer

T = TypeVar("T")

SONAME = "libnccl.so.2"
_SUCCESS, _IN_PROGRESS = 0, 7
"""Results of `NcclCommunicator.state` (ncclResult_t)."""


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


def _messages(given: Sequence[tuple[int, DeviceBuffer]]) -> list[tuple[int, int, int]]:
    return [(rank, buffer.address, buffer.nbytes) for rank, buffer in given]


def _opened(library: str | None, call: Callable[[str], T]) -> T:
    path = library or find_nccl()
    try:
        return call(path)
    except RuntimeError as error:
        hint = "install nvidia-nccl-cu13 (or -cu12), or put the library's directory on LD_LIBRARY_PATH"
        raise UserError(f"NCCL ({path})", got=str(error), expected="NVIDIA's NCCL 2.14 or later", hint=hint) from error
