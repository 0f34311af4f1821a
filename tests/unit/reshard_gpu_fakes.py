"""A GPU in host memory, as transports use it, with kernels that complete a few polls after they were enqueued."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.memory import DeviceBuffer

SHARED: dict[bytes, DeviceBuffer] = {}
_numbers = itertools.count(1)


class FakeEvent:
    def __init__(self, looks: int) -> None:
        self.looks, self.left = looks, 0

    def record(self, stream: int) -> None:
        self.left = self.looks

    def done(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() > until:
                return False
            time.sleep(0.0001)
        return True

    def hold(self, stream: int) -> None:
        pass


class FakeGpu(Gpu):
    """Its "device" is the CPU, so that an exchange runs its programs there."""

    def __init__(self, looks: int = 3) -> None:
        self.index, self.device, self.looks = 0, "cpu", looks

    def event(self) -> FakeEvent:
        return FakeEvent(self.looks)

    def stream(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(handle=7)

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def allocate(self, nbytes: int) -> DeviceBuffer:
        array = np.full(nbytes, 0xAA, np.uint8)
        return DeviceBuffer(array, array.ctypes.data, nbytes, "cpu")

    def share(self, buffer: DeviceBuffer) -> bytes:
        handle = next(_numbers).to_bytes(64, "little")
        SHARED[handle] = buffer
        return handle

    def open(self, handle: bytes, nbytes: int) -> DeviceBuffer:
        assert SHARED[handle].nbytes == nbytes
        return SHARED[handle]


def bytes_of(buffer: DeviceBuffer) -> np.ndarray:
    """A view of a buffer of a `FakeGpu`."""
    start = buffer.address - buffer.owner.ctypes.data
    return buffer.owner[start : start + buffer.nbytes]
