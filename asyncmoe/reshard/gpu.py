"""A GPU as transports and exchanges use it, without an array library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import OutOfDeviceMemory, UserError, WaitTimeout
from asyncmoe.reshard.memory import DeviceBuffer

T = TypeVar("T")
Relieve = Callable[[], None]
"""Makes an array library in this process free its cached device memory."""


def nothing_to_give() -> None:
    """The `Relieve` for a process without an array library."""


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

    def event(self) -> _C.DeviceEvent:
        """Return an event in a stream: `record` puts it there, `wait` waits for it without the GIL, and `hold` makes all later work on a
        stream wait for it."""
        return _C.DeviceEvent(self.index)

    def stream(self) -> _C.DeviceStream:
        """Return a new stream that does not synchronise with the default stream; it exists as long as the returned object."""
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
        owner = self.take("messages", nbytes, lambda: _C.DeviceMemory(self.index, nbytes))
        return DeviceBuffer(owner, owner.address, nbytes, self.device)

    def take(self, what: str, nbytes: int | None, allocate: Callable[[], T]) -> T:
        """Return the result of an allocation; if memory is short, retry once after `relieve`.

        Raises:
            OutOfDeviceMemory: the retry failed too.
        """
        try:
            return allocate()
        except MemoryError:
            self._relieve()
        try:
            return allocate()
        except MemoryError as error:
            raise OutOfDeviceMemory(self.device, what, nbytes, *_C.device_memory(self.index)) from error

    def share(self, buffer: DeviceBuffer) -> bytes:
        """Return an IPC handle with which another process on this host can open a buffer from `allocate`."""
        return buffer.owner.handle()  # type: ignore[attr-defined,no-any-return]

    def open(self, handle: bytes, nbytes: int) -> DeviceBuffer:
        """Open memory shared by another process, which must keep it allocated until the last reference to the returned buffer is gone."""
        owner = _C.DeviceMemory.open(self.index, nbytes, handle)
        return DeviceBuffer(owner, owner.address, nbytes, self.device)


class GpuCopies:
    """Copy programs on one GPU, enqueued on one stream. Their tables are uploaded here, so that a run consists only of kernel launches.

    Raises:
        UserError: as `Gpu`.
        OutOfDeviceMemory: the device has too little memory left for the tables.
    """

    def __init__(self, device: str, stream: int, programs: Sequence[_C.Program], relieve: Relieve = nothing_to_give) -> None:
        self.device, self._stream = device, stream
        gpu = Gpu(int(device.removeprefix("cuda:")), relieve)
        made = {id(one): gpu.take("tables of copies", None, partial(_C.DeviceProgram, one, gpu.index)) for one in programs}
        self._programs, self._end = made, gpu.event()

    def run(self, program: _C.Program, chunk: int, sources: np.ndarray, destinations: np.ndarray, seal: int) -> None:
        """Enqueue one chunk of a program. Its digest, XORed with `seal`, is written after the message or compared with the one there."""
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
