"""Plain copies on a GPU, to compare the copy kernel with, and times by the wall clock and by the device's events."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import torch

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, WaitTimeout
from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.memory import DeviceBuffer

Piece = tuple[int, int, int]
"""Destination, source, bytes."""
Turn = Callable[[], None]
"""Enqueues copies on a timer's stream."""

_WORTH_A_COPY = 1 << 20
"""Bytes of the smallest array that is copied: of the rest there are many, and few bytes."""
_TIMEOUT_S = 120.0
_AHEAD_CYCLES = 10_000_000
"""About 5 ms, in which the host enqueues some thousand launches, more than a stream takes at once."""


class Timer:
    """A stream of its own, as cudaMemcpyBatchAsync refuses the default stream, and the time that work on it takes."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._stream = gpu, gpu.stream()
        self.handle = self._stream.handle
        self._torchs = torch.cuda.ExternalStream(self.handle, device=gpu.device)  # type: ignore[no-untyped-call]

    def seconds(self, enqueue: Turn) -> tuple[float, float]:
        """Enqueue twice; return the seconds of the first by the wall clock, of the second by events.

        The device begins the second when most of it is enqueued, so that its time has no waiting for the host. A stream holds about a
        thousand launches; of more, the rest is enqueued meanwhile.

        Raises:
            WaitTimeout: the work did not end.
        """
        started = time.perf_counter()
        enqueue()
        self.finish()
        wall = time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._torchs):
            torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        begin.record(self._torchs)
        enqueue()
        end.record(self._torchs)
        self.finish()
        return wall, begin.elapsed_time(end) / 1e3

    def finish(self) -> None:
        """Wait for all work. Raises WaitTimeout."""
        event = _C.DeviceEvent(self._gpu.index)
        event.record(self.handle)
        if not event.wait(_TIMEOUT_S):
            raise WaitTimeout(self._gpu.device, "the measured copies", _TIMEOUT_S)


def pieces_of(arrays: Sequence[DeviceBuffer], whole: DeviceBuffer, largest: int, *, out: bool) -> list[Piece]:
    """Return copies of all large arrays, in pieces of at most `largest` bytes, into one buffer, one after the other, or out of it."""
    pieces: list[Piece] = []
    place = whole.address
    for array in arrays:
        for start in range(0, array.nbytes if array.nbytes >= _WORTH_A_COPY else 0, largest):
            count = min(largest, array.nbytes - start)
            pieces.append((place, array.address + start, count) if out else (array.address + start, place, count))
            place += count
    return pieces


def one_by_one(pieces: Sequence[Piece], gpu: Gpu, stream: int) -> Turn:
    """Return a turn with a cudaMemcpyAsync for each piece."""

    def enqueue() -> None:
        for destination, source, count in pieces:
            _C.copy_plainly(gpu.index, destination, source, count, stream)

    return enqueue


def batched(pieces: Sequence[Piece], stream: int) -> Turn | None:
    """Return a turn with one cudaMemcpyBatchAsync, or None without CUDA 13's runtime, whose signature this is (cuda_runtime_api.h)."""
    try:
        call = ctypes.CDLL("libcudart.so.13").cudaMemcpyBatchAsync  # torch has loaded it
    except (OSError, AttributeError):
        return None
    count, (destinations, sources, sizes) = len(pieces), zip(*pieces, strict=True)
    pointers, lengths = ctypes.c_void_p * count, ctypes.c_size_t * count
    # cudaMemcpyAttributes of all: sources are accessed in the stream's order; hints of device 0 for source and destination; no flags.
    attributes, first = (ctypes.c_int * 6)(1, 1, 0, 1, 0, 0), ctypes.c_size_t(0)
    arguments = (pointers(*destinations), pointers(*sources), lengths(*sizes), ctypes.c_size_t(count))
    how = (attributes, ctypes.byref(first), ctypes.c_size_t(1), ctypes.c_void_p(stream))

    def enqueue() -> None:
        if (status := call(*arguments, *how)) != 0:
            raise InvariantBroken(f"cudaMemcpyBatchAsync of {count} pieces: got cudaError_t {status}, expected 0")

    return enqueue
