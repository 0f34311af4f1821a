"""One GPU as used by transports and exchanges, without an array library."""

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
"""Makes an array library of this process free its cached device memory."""


def nothing_to_give() -> None:
    """The `Relieve` of a process without such a library."""


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: int) -> None: ...

    def done(self) -> bool: ...

    def wait(self, timeout_s: float) -> bool:
        """Return whether the device passed the event in time; waits without the GIL."""

    def hold(self, stream: int) -> None:
        """Make all work enqueued on a stream from now on wait for the event."""


class Gpu:
    """A device by its CUDA number. Streams are cudaStream_t as integers; 0 is the default stream.

    Args:
        relieve: called once before an allocation fails for lack of memory.

    Raises:
        UserError: this build has no CUDA kernels, or the device does not exist.
    """

    def __init__(self, index: int, relieve: Relieve = nothing_to_give) -> None:
        if not _C.CUDA:
            hint = "build asyncmoe with nvcc installed and ASYNCMOE_CUDA=1"
            raise UserError(f"GPU {index}", got="a build without CUDA kernels", expected="one with them", hint=hint)
        count = _C.cuda_device_count()
        if not 0 <= index < count:
            raise UserError(f"GPU {index}", got=f"{count} visible devices", expected="a device of that number")
        self.index, self.device, self._relieve = index, f"cuda:{index}", relieve

    def event(self) -> Event:
        return _C.DeviceEvent(self.index)

    def stream(self) -> _C.DeviceStream:
        """Return a new stream that does not synchronise with the default stream; it lives as long as the returned object."""
        return _C.DeviceStream(self.index)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU the calling thread's current device within the context."""
        before = _C.swap_device(self.index)
        try:
            yield
        finally:
            _C.restore_device(before)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Allocate device memory; its address is a multiple of 256.

        Raises:
            OutOfDeviceMemory: the device has too little memory left.
        """
        owner = with_room(self.index, "messages", nbytes, self._relieve, lambda: _C.DeviceMemory(self.index, nbytes))
        return DeviceBuffer(owner, owner.address, nbytes, self.device)

    def share(self, buffer: DeviceBuffer) -> bytes:
        """Return an IPC handle with which another process of this host opens a buffer from `allocate`."""
        return buffer.owner.handle()  # type: ignore[attr-defined,no-any-return]

    def open(self, handle: bytes, nbytes: int) -> DeviceBuffer:
        """Open memory shared by another process, which must keep it allocated until the last reference to the returned buffer is gone."""
        owner = _C.DeviceMemory.open(self.index, nbytes, handle)
        return DeviceBuffer(owner, owner.address, nbytes, self.device)


class GpuCopies:
    """Copy programs on one GPU, enqueued on one stream. Their tables are uploaded here, so a run consists of kernel launches only.

    Raises:
        LayoutError: this build has no CUDA kernels.
        OutOfDeviceMemory: the device has too little memory left for the tables.
    """

    def __init__(self, device: str, stream: int, programs: Sequence[_C.Program], relieve: Relieve = nothing_to_give) -> None:
        number = re.fullmatch(r"cuda:(\d+)", device)
        if number is None or not _C.CUDA:
            hint = "build asyncmoe with nvcc installed and ASYNCMOE_CUDA=1"
            raise LayoutError("arrays of an exchange", got=device, expected="cpu, as this build has no CUDA kernels", hint=hint)
        self.device, self._stream = device, stream
        index = int(number[1])
        self._programs = {
            id(program): with_room(index, "tables of copies", None, relieve, partial(_C.DeviceProgram, program, index))
            for program in programs
        }
        self._end = _C.DeviceEvent(index)

    def run(self, program: _C.Program, chunk: int, sources: np.ndarray, destinations: np.ndarray, seal: int) -> None:
        """Enqueue a chunk of one of the programs. Its digest, XORed with `seal`, is written after the message or compared with it."""
        self._programs[id(program)].run(chunk, sources, destinations, seal, self._stream)

    def finish(self, timeout_s: float) -> None:
        """Wait for all enqueued copies.

        Raises:
            WaitTimeout: they did not finish in time.
        """
        self._end.record(self._stream)
        if not self._end.wait(timeout_s):
            raise WaitTimeout(self.device, "the copies enqueued on its stream", timeout_s)

    def mismatch(self, program: _C.Program) -> int:
        """Return the first chunk since the last call whose digest differed from its trailer, or -1. Call `finish` first."""
        return self._programs[id(program)].take_mismatch()


def with_room(index: int, what: str, nbytes: int | None, relieve: Relieve, take: Callable[[], T]) -> T:
    """Return the result of the allocation `take`; if memory is short, retry once after `relieve`.

    Raises:
        OutOfDeviceMemory: the retry failed, too.
    """
    try:
        return take()
    except MemoryError:
        relieve()
    try:
        return take()
    except MemoryError as error:
        raise OutOfDeviceMemory(f"cuda:{index}", what, nbytes, *_C.device_memory(index)) from error
