"""Messages between GPU processes on one host through CUDA IPC: the receiver unpacks them directly from the sender's device memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import TransferError, WaitTimeout
from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.memory import DeviceBuffer
from asyncmoe.reshard.shm_transport import GONE, READY, RingEnd, RingLink, ShmTransport, used_slots
from asyncmoe.reshard.transport import Lane, Link, TransportEnd

_HANDLE_BYTES = 64
"""Size of a cudaIpcMemHandle_t (CUDA runtime API)."""
_ALIGNMENT = 256
_CLOSING_S = 10.0


class IpcTransport:
    """CUDA IPC. Slots lie in the sender's device memory; a shared-memory ring (of `ShmTransport`) records which slots are filled or free.

    Kernels never wait: a slot is handed over once the host sees that its kernel is done. A dead peer is detected as in `ShmTransport`.
    Two ranks may share a device; otherwise their devices must have peer access (`cudaDeviceCanAccessPeer`). Each rank must be a separate
    process, because CUDA cannot open a handle in the process that created it.

    Args:
        rank, session: as for `ShmTransport`.
        device: number of this process's GPU.
        stream: the `Exchanger`'s stream, a cudaStream_t as an integer.

    Raises:
        LayoutError: an invalid session name.
        UserError: the GPU does not exist.
    """

    def __init__(self, rank: int, session: str, device: int, *, stream: int = 0, gpu: Gpu | None = None) -> None:
        self.rank, self._stream = rank, stream
        self._control = ShmTransport(rank, session)
        self._gpu = gpu or Gpu(device)

    def connect(self, outgoing: Sequence[Lane], incoming: Sequence[Lane], slots: int, timeout_s: float) -> Link:
        """As `SharedTransport.connect`; allocates device memory for all outgoing slots.

        Raises:
            WaitTimeout: a sender did not connect in time.
            TransferError: as `ShmTransport.connect`; or the GPU has too little memory left.
        """
        memory = [self._allocate(lane, slots) for lane in outgoing]
        handles = [self._gpu.share(buffer) for buffer in memory]
        created, attached = self._control.rings(_control(outgoing, slots), _control(incoming, slots), slots, timeout_s)
        for ring, handle in zip(created, handles, strict=True):
            ring.slot(0)[:] = np.frombuffer(handle, np.uint8)  # the receiver reads it when the first message is announced
        out = [_Sending(self.rank, lane, slots, ring, buffer) for lane, ring, buffer in zip(outgoing, created, memory, strict=True)]
        into = [_Receiving(self.rank, lane, slots, ring, self._gpu) for lane, ring in zip(incoming, attached, strict=True)]
        return _IpcLink(self._gpu, self._stream, out, into)

    def _allocate(self, lane: Lane, slots: int) -> DeviceBuffer:
        try:
            return self._gpu.allocate(used_slots(lane, slots) * _stride(lane))
        except RuntimeError as error:
            raise TransferError(self.rank, lane.peer, str(error)) from error


def open_ipc(end: TransportEnd) -> IpcTransport:
    """Open a rank's end of a channel between GPUs.

    Raises:
        UserError: as `IpcTransport`.
    """
    assert end.device is not None  # as `asyncmoe.config.transports.transport_for` sees to
    return IpcTransport(end.rank, end.session, end.device, stream=end.stream, gpu=Gpu(end.device, end.relieve))


class _DeviceRingEnd(RingEnd):
    """An end of a lane whose slots lie in device memory."""

    memory: DeviceBuffer | None = None

    def slot(self, number: int) -> DeviceBuffer:
        assert self.memory is not None
        start = self.count % self.slots * _stride(self.lane)
        return self.memory[start : start + self.lane.message_bytes[number]]


class _Sending(_DeviceRingEnd):
    def __init__(self, rank: int, lane: Lane, slots: int, ring: _C.ShmRing, memory: DeviceBuffer) -> None:
        super().__init__(rank, lane.peer, lane, slots, ring)
        self.memory = memory

    def close(self, deadline: float) -> None:
        """Free the slots once the receiver has released them; after the deadline, keep them until this process ends."""
        while self.count and self.ring.wait(0.05, self.slots + 1) != GONE:
            if time.monotonic() > deadline:
                _kept.append(self.memory)
                break
        self.memory = None


_kept: list[DeviceBuffer | None] = []
"""Memory that a peer may still read: freeing it while a handle is open is undefined behaviour (CUDA runtime API, cudaIpcOpenMemHandle)."""


class _Receiving(_DeviceRingEnd):
    def __init__(self, rank: int, lane: Lane, slots: int, ring: _C.ShmRing, gpu: Gpu) -> None:
        super().__init__(lane.peer, rank, lane, slots, ring)
        self._gpu = gpu

    def slot(self, number: int) -> DeviceBuffer:
        if self.memory is None:
            handle = self.ring.slot(0).tobytes()
            try:
                self.memory = self._gpu.open(handle, self.slots * _stride(self.lane))
            except RuntimeError as error:
                raise TransferError(self.source, self.destination, str(error)) from error
        return super().slot(number)


class _IpcLink(RingLink):
    """See `asyncmoe.reshard.transport.Link`. Slots wait in a queue, and are handed over once the kernels enqueued before them are done."""

    _out: list[_Sending]
    _into: list[_Receiving]

    def __init__(self, gpu: Gpu, stream: int, out: list[_Sending], into: list[_Receiving]) -> None:
        super().__init__(out, into)
        self.device = gpu.device
        self._gpu, self._stream = gpu, stream
        self._pending: deque[tuple[_C.DeviceEvent, RingEnd]] = deque()
        self._events: list[_C.DeviceEvent] = []

    def close_round(self, number: int, timeout_s: float) -> None:
        self._settle(lambda event: event.done())

    def finish(self, timeout_s: float) -> None:
        self._settle(self._until(timeout_s))
        super().finish(timeout_s)

    def close(self) -> None:
        deadline = time.monotonic() + _CLOSING_S
        while self._pending:
            self._pending.popleft()[0].wait(max(0.0, deadline - time.monotonic()))
        # Free the memory before its ring: once nothing references the ring, its sender knows that the memory is released. No variable of
        # this function may keep a reference to a ring: below, this rank waits for its receivers, each of which may be waiting for this
        # rank.
        while self._into:
            self._into.pop().memory = None
        for end in self._out:
            end.close(deadline)
        self._out = []

    def _hand_over(self, end: RingEnd) -> None:
        end.count += 1
        event = self._events.pop() if self._events else self._gpu.event()
        event.record(self._stream)
        self._pending.append((event, end))

    def _wait(self, end: RingEnd, what: str, timeout_s: float) -> None:
        """Wait until this rank owns a slot of a lane. Before waiting for peers, hand over everything that they may be waiting for."""
        self._settle(lambda event: event.done())
        if end.ring.wait(0.0, 1 + sum(owner is end for _, owner in self._pending)) != READY:
            self._settle(self._until(timeout_s))
            end.wait(what, timeout_s)

    def _settle(self, done: Callable[[_C.DeviceEvent], bool]) -> None:
        """Hand over slots in order, up to the first whose kernel is not done."""
        while self._pending and done(self._pending[0][0]):
            event, end = self._pending.popleft()
            self._events.append(event)
            end.ring.advance()

    def _until(self, timeout_s: float) -> Callable[[_C.DeviceEvent], bool]:
        def done(event: _C.DeviceEvent) -> bool:
            if not event.wait(timeout_s):
                raise WaitTimeout(self.device, "the copies enqueued on its stream", timeout_s)
            return True

        return done


def _control(lanes: Sequence[Lane], slots: int) -> list[Lane]:
    """Return the lanes of the control rings, which have as many slots, each of the size of an IPC handle."""
    return [Lane(lane.peer, (_HANDLE_BYTES,) * used_slots(lane, slots), _HANDLE_BYTES) for lane in lanes]


def _stride(lane: Lane) -> int:
    return -(-lane.slot_bytes // _ALIGNMENT) * _ALIGNMENT
