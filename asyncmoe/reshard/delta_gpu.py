"""Sparse deltas of weights in the memory of a GPU: csrc/delta.cu, and the buffers that its kernels work in.

Messages are the CPU's, byte for byte: a delta that a GPU coded may be applied on a CPU and the other way round. They are in host memory:
of 1 GB with one element in a hundred changed they take 16 MB, which crosses to the device and back in a fraction of what reading the
gigabyte takes. The code of positions is written and read by the kernels, one wait for the device a message.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError, WaitTimeout
from asyncmoe.reshard.chunks import trailer_offset
from asyncmoe.reshard.delta_format import FRAME_BYTES, HEADER_BYTES
from asyncmoe.reshard.delta_work import Coded, HostElements, payload_of
from asyncmoe.reshard.gpu import Gpu, Relieve, with_room
from asyncmoe.reshard.memory import DeviceBuffer

BaseMemory = Literal["device", "host"]
"""Where the base of weights on a GPU is: in the GPU's memory, or in the host's, from which every comparison reads all of it."""
_ALIGNMENT = 256
_TRAILER = 8
_PATIENCE_S = 300.0
_PINNED_UNIT = 64 << 10
_hung: list[DeltaGpu] = []
"""Those that a device did not answer in time: freeing their memory would wait for it for good."""


class DeltaGpu:
    """A GPU as one sender or receiver of deltas uses it: one stream, and buffers that all messages take in turn.

    Args:
        device: "cuda:0".
        stream: a cudaStream_t as an integer. All work is enqueued there, and waited for.

    Raises:
        LayoutError: this build has no CUDA kernels.
        UserError: the device does not exist.
    """

    def __init__(self, device: str, stream: int, relieve: Relieve) -> None:
        number = re.fullmatch(r"cuda:(\d+)", device)
        if number is None or not _C.CUDA:
            hint = "build asyncmoe with nvcc installed and ASYNCMOE_CUDA=1"
            raise LayoutError("arrays of a delta", got=device, expected="host memory, as this build has no CUDA kernels", hint=hint)
        self.device, self.index, self.stream, self._relieve = device, int(number[1]), stream, relieve
        self._gpu = Gpu(self.index, relieve)
        self._done = self._gpu.event()
        self._buffers: dict[str, DeviceBuffer] = {}
        self._owned: list[object] = []
        self._lent: list[np.ndarray] = []
        self._spare: list[np.ndarray] = []

    def program(self, pack: _C.Program) -> _C.DeviceProgram:
        made = with_room(self.index, "tables of copies", None, self._relieve, partial(_C.DeviceProgram, pack, self.index))
        self._owned.append(made)
        return made

    def table(self, table: _C.DeltaTable) -> _C.DeviceDelta:
        made = with_room(self.index, "tables of deltas", None, self._relieve, partial(_C.DeviceDelta, table, self.index))
        self._owned.append(made)
        return made

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Return memory of the device that is kept as long as this object."""
        made = self._gpu.allocate(max(1, nbytes))
        self._owned.append(made)
        return made

    def room(self, name: str, nbytes: int) -> int:
        """Return the address of this GPU's buffer of a name, of at least so many bytes; what it held is lost.

        Raises:
            OutOfDeviceMemory: the device has too little memory left.
        """
        if name not in self._buffers or self._buffers[name].nbytes < nbytes:
            self._buffers.pop(name, None)
            self._buffers[name] = self._gpu.allocate(max(1, nbytes))
        return self._buffers[name].address

    def lend(self, nbytes: int) -> np.ndarray:
        """Return host memory that stays in place, uint8[nbytes], until `take_back`; raise MemoryError if there is none.

        Pinning memory and letting go of it may wait for the device, so what was taken back is lent again: the smallest that is large
        enough. If none is, the largest gives way, so that there are no more of them than messages of a version.
        """
        large_enough = [i for i, one in enumerate(self._spare) if len(one) >= nbytes]
        if large_enough:
            found = self._spare.pop(large_enough[0])
        else:
            del self._spare[-1:]
            found = self.pinned(-(-nbytes // _PINNED_UNIT) * _PINNED_UNIT)
        self._lent.append(found)
        return found[:nbytes]

    def take_back(self) -> None:
        """Take back all that was lent; nobody uses it any more."""
        self._spare = sorted([*self._spare, *self._lent], key=len)
        self._lent = []

    def pinned(self, nbytes: int) -> np.ndarray:
        """Return host memory that stays in place, uint8[nbytes]; raise MemoryError if there is none."""
        owner = _C.PinnedMemory(self.index, max(1, nbytes))
        memory = (ctypes.c_uint8 * nbytes).from_address(owner.address)
        memory.owner = owner  # type: ignore[attr-defined]  # the array keeps `memory` as long as a view of it exists
        return np.ctypeslib.as_array(memory)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Enqueue a copy within the device, or between the host and it."""
        _C.copy_plainly(self.index, destination, source, nbytes, self.stream)

    def wait(self) -> None:
        """Wait until everything enqueued is done.

        Raises:
            WaitTimeout: the device did not do it in time.
        """
        self._done.record(self.stream)
        if not self._done.wait(_PATIENCE_S):
            _hung.append(self)
            raise WaitTimeout(self.device, "the kernels of a delta enqueued on its stream", _PATIENCE_S)


class DeviceElements:
    """See `asyncmoe.reshard.delta_work.Elements`: elements on a GPU. A payload is copied to the device first."""

    def __init__(self, gpu: DeltaGpu, table: _C.DeltaTable) -> None:
        self._gpu, self._there = gpu, gpu.table(table)

    def read(self, number: int, places: np.ndarray) -> int:
        self._there.read(number, places, self._gpu.stream)
        self._gpu.wait()
        return self._there.take()[1]

    def apply(self, number: int, message: np.ndarray, places: np.ndarray, *, write: bool) -> int:
        address, nbytes = payload_of(message)
        payload = self._gpu.room("payload", nbytes)
        self._gpu.copy(payload, address, nbytes)
        self._there.apply(number, payload, nbytes, places, write, self._gpu.stream)
        self._gpu.wait()
        return self._there.take()[1]

    def encode(self, number: int, now: int, old: int, payload: int) -> tuple[int, int, int, int]:
        """Code what differs between two packed messages; return bytes of the payload, difference, changed elements, whole blocks."""
        self._there.encode(number, now, old, payload, self._gpu.stream)
        self._gpu.wait()
        return self._there.take()


class DeviceBase:
    """See `asyncmoe.reshard.delta_work.Base`: of sources on a GPU. Messages are packed there by the copy kernel, casts included.

    Takes two buffers of the largest message, and with the base in host memory a third.

    Raises:
        OutOfDeviceMemory: the device has too little memory left; `memory="host"` takes the least.
        MemoryError: the host has too little memory that can stay in place.
    """

    def __init__(self, gpu: DeltaGpu, pack: _C.Program, table: _C.DeltaTable, nbytes: Sequence[int], memory: BaseMemory) -> None:
        self._gpu, self._table, self._nbytes = gpu, table, nbytes
        self._pack, self._elements = gpu.program(pack), DeviceElements(gpu, table)
        steps = [-(-(trailer_offset(one) + _TRAILER) // _ALIGNMENT) * _ALIGNMENT for one in nbytes]  # each packed with its trailer
        self._begins: list[int] = np.cumsum([0, *steps]).tolist()
        self._largest, self._bound = max(steps), max(table.bound(i) for i in range(len(nbytes)))
        self._kept: np.ndarray | None = gpu.pinned(self._begins[-1]) if memory == "host" else None
        self._there = gpu.allocate(self._begins[-1]) if self._kept is None else None
        self._start = int(self._kept.ctypes.data) if self._kept is not None else self._there.address if self._there else 0
        for name, size in (("now", self._largest), ("payload", self._bound), ("old", self._largest)):
            if name != "old" or self._kept is not None:
                gpu.room(name, size)  # now, while the update can still be given up

    def fill(self, number: int, sources: np.ndarray) -> int:
        here = self._address(number)
        packed = here if self._kept is None else self._gpu.room("now", self._largest)
        self._run(number, sources, packed)
        total = self._elements.read(number, _one(packed))
        if packed != here:
            self._gpu.copy(here, packed, self._nbytes[number])
            self._gpu.wait()
        return total

    def encode(self, number: int, sources: np.ndarray) -> Coded:
        now, payload, old = self._gpu.room("now", self._largest), self._gpu.room("payload", self._bound), self._address(number)
        self._run(number, sources, now)
        if self._kept is not None:
            here, old = old, self._gpu.room("old", self._largest)
            self._gpu.copy(old, here, self._nbytes[number])
        nbytes, difference, changed, blocks = self._elements.encode(number, now, old, payload)
        frame = np.empty(FRAME_BYTES + nbytes, np.uint8)
        self._gpu.copy(int(frame.ctypes.data) + HEADER_BYTES, payload, nbytes)
        self._gpu.wait()
        return Coded(frame, difference, changed, blocks)

    def advance(self, number: int, message: np.ndarray) -> int:
        elements = self._elements if self._kept is None else HostElements(self._table, 1)
        return elements.apply(number, message, _one(self._address(number)), write=True)

    def _address(self, number: int) -> int:
        return self._start + self._begins[number]

    def _run(self, number: int, sources: np.ndarray, message: int) -> None:
        self._pack.run(number, sources, _one(message), 0, self._gpu.stream)


def _one(address: int) -> np.ndarray:
    return np.array([address], np.uint64).view(np.int64)
