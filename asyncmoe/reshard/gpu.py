"""One GPU, as transports and exchanges need it; no array library takes part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError, OutOfDeviceMemory, UserError, WaitTimeout
from asyncmoe.reshard.memory import DeviceBuffer

T = TypeVar("T")
Relieve = Callable[[], None]
"""What makes an array library of this process give back the memory of a device that it only keeps for later."""


def nothing_to_give() -> None:
    """For a process without such a library."""


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: int) -> None: ...

    def done(self) -> bool: ...

    def wait(self, timeout_s: float) -> bool:
        """Whether the device came past it in time; the interpreter's lock is free meanwhile."""

    def hold(self, stream: int) -> None:
        """What is enqueued on a stream from now on waits for it."""


class Gpu:
    """A device by its CUDA number. Streams are cudaStream_t as integers; 0 is the default stream.

    Args:
        relieve: tried once before memory is said to be short.

    Raises:
        UserError: this build has no CUDA kernels, or there is no such device.
    """

    def __init__(self, index: int, relieve: Relieve = nothing_to_give) -> None:
        if not _C.CUDA:
            cure = "build asyncmoe where nvcc is, with ASYNCMOE_CUDA=1"
            raise UserError(f"GPU {index}", got="a build without CUDA kernels", expected="one with them", cure=cure)
        count = _C.cuda_device_count()
        if not 0 <= index < count:
            raise UserError(f"GPU {index}", got=f"{count} visible devices", expected="a device of that number")
        self.index, self.device, self._relieve = index, f"cuda:{index}", relieve

    def event(self) -> Event:
        return _C.DeviceEvent(self.index)

    def stream(self) -> _C.DeviceStream:
        """A new stream that does not wait for the default one; it lives as long as this object."""
        return _C.DeviceStream(self.index)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes this the calling thread's device for a while."""
        before = _C.swap_device(self.index)
        try:
            yield
        finally:
            _C.restore_device(before)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Memory of its own, a multiple of 256 in address.

        Raises:
            OutOfDeviceMemory: the device has none left.
        """
        owner = with_room(self.index, "messages", nbytes, self._relieve, lambda: _C.DeviceMemory(self.index, nbytes))
        return DeviceBuffer(owner, owner.address, nbytes, self.device)

    def share(self, buffer: DeviceBuffer) -> bytes:
        """A handle by which another process of this host finds what `allocate` returned here."""
        return buffer.owner.handle()  # type: ignore[attr-defined,no-any-return]

    def open(self, handle: bytes, nbytes: int) -> DeviceBuffer:
        """Memory another process shared. It must stay there until the last reference to this is gone."""
        owner = _C.DeviceMemory.open(self.index, nbytes, handle)
        return DeviceBuffer(owner, owner.address, nbytes, self.device)


class GpuCopies:
    """Programs on one GPU, enqueued on one stream. Tables are uploaded here, so that a run is kernel launches alone.

    Raises:
        LayoutError: this build has no CUDA kernels.
        OutOfDeviceMemory: the device has none left for the tables.
    """

    def __init__(self, device: str, stream: int, programs: Sequence[_C.Program], relieve: Relieve = nothing_to_give) -> None:
        number = re.fullmatch(r"cuda:(\d+)", device)
        if number is None or not _C.CUDA:
            cure = "build asyncmoe where nvcc is, with ASYNCMOE_CUDA=1"
            raise LayoutError("arrays of an exchange", got=device, expected="cpu, as this build has no CUDA kernels", cure=cure)
        self.device, self._stream = device, stream
        index = int(number[1])
        self._programs = {
            id(program): with_room(index, "tables of copies", None, relieve, partial(_C.DeviceProgram, program, index))
            for program in programs
        }
        self._end = _C.DeviceEvent(index)

    def run(self, program: _C.Program, chunk: int, sources: np.ndarray, destinations: np.ndarray, seal: int) -> None:
        """Enqueue a chunk of one of the programs; its digest, xor `seal`, is written behind the message or compared there."""
        self._programs[id(program)].run(chunk, sources, destinations, seal, self._stream)

    def finish(self, timeout_s: float) -> None:
        """Wait for all that is enqueued.

        Raises:
            WaitTimeout: it was not done in time.
        """
        self._end.record(self._stream)
        if not self._end.wait(timeout_s):
            raise WaitTimeout(self.device, "the copies enqueued on its stream", timeout_s)

    def mismatch(self, program: _C.Program) -> int:
        """The first chunk since the last call whose digest was not what lay behind its message, or -1. Call `finish` first."""
        return self._programs[id(program)].take_mismatch()


def with_room(index: int, what: str, nbytes: int | None, relieve: Relieve, take: Callable[[], T]) -> T:
    """What `take` allocates; when there is no memory left, once more after `relieve`.

    Raises:
        OutOfDeviceMemory: there was still none.
    """
    try:
        return take()
    except MemoryError:
        relieve()
    try:
        return take()
    except MemoryError as error:
        raise OutOfDeviceMemory(f"cuda:{index}", what, nbytes, *_C.device_memory(index)) from error
