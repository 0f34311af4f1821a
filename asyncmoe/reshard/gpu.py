"""One GPU, as transports and exchanges need it; no array library takes part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError, UserError, WaitTimeout
from asyncmoe.reshard.memory import DeviceBuffer


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

    Raises:
        UserError: this build has no CUDA kernels, or there is no such device.
    """

    def __init__(self, index: int) -> None:
        if not _C.CUDA:
            cure = "build asyncmoe where nvcc is, with ASYNCMOE_CUDA=1"
            raise UserError(f"GPU {index}", got="a build without CUDA kernels", expected="one with them", cure=cure)
        count = _C.cuda_device_count()
        if not 0 <= index < count:
            raise UserError(f"GPU {index}", got=f"{count} visible devices", expected="a device of that number")
        self.index, self.device = index, f"cuda:{index}"

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
            _C.swap_device(before)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Memory of its own, a multiple of 256 in address."""
        owner = _C.DeviceMemory(self.index, nbytes)
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
    """

    def __init__(self, device: str, stream: int, programs: Sequence[_C.Program]) -> None:
        number = re.fullmatch(r"cuda:(\d+)", device)
        if number is None or not _C.CUDA:
            cure = "build asyncmoe where nvcc is, with ASYNCMOE_CUDA=1"
            raise LayoutError("arrays of an exchange", got=device, expected="cpu, as this build has no CUDA kernels", cure=cure)
        self.device, self._stream = device, stream
        self._programs = {id(program): _C.DeviceProgram(program, int(number[1])) for program in programs}
        self._end = _C.DeviceEvent(int(number[1]))

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
