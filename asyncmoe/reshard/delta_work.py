"""Packs, compares, verifies, writes and reads the elements of deltas: on the CPU, or with GPU kernels (csrc/delta.h, csrc/device_delta.h).

CPU and GPU make the same bytes: a delta encoded on one may be applied on the other. All of a GPU's work is on one stream; every
method except `copy` waits for its own work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from functools import partial

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import WaitTimeout
from asyncmoe.reshard.chunks import TRAILER_BYTES, trailer_offset
from asyncmoe.reshard.gpu import Gpu, Relieve
from asyncmoe.reshard.memory import DeviceBuffer

PAYLOAD = "payload"
_PATIENCE_S = 300.0


class HostWork:
    """Memory and work of one sender or receiver in host memory. `sources` and `places` are arrays of storage addresses, int64; other
    addresses are int.

    A table describes elements; a program packs their messages (`asyncmoe.reshard.programs.message_program`).

    Args:
        threads: 0: one per core, at most 4.
    """

    device = "cpu"

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._rooms: dict[Hashable, np.ndarray] = {}

    def room(self, name: Hashable, nbytes: int) -> int:
        """Return the address of the named buffer, with at least `nbytes` bytes; its earlier contents are lost.

        Raises:
            MemoryError, OutOfDeviceMemory: there is too little memory left.
        """
        if _coded(name) or name not in self._rooms or self._rooms[name].nbytes < nbytes:
            self._rooms[name] = np.empty(nbytes, np.uint8)
        return int(self._rooms[name].ctypes.data)

    def release(self, *, all_: bool) -> None:
        """Free the buffers whose names are tuples ("coded", ...). Without `all_`, those that take time to allocate again stay."""
        self._rooms = {name: room for name, room in self._rooms.items() if not _coded(name) and name != PAYLOAD}

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy bytes between a buffer and a message of an exchange on this device."""
        ctypes.memmove(to, source, nbytes)

    def fill(self, table: _C.DeltaTable, pack: _C.Program, number: int, sources: np.ndarray, base: int) -> int:
        """Pack a message into `base`, which has room for its trailer; return the sum of its elements' terms."""
        pack.run(number, sources, one_address(base), self._threads)
        return table.read(number, np.empty(0, np.int64), base, self._threads)

    def encode(
        self, table: _C.DeltaTable, pack: _C.Program, number: int, sources: np.ndarray, base: int, payload: int
    ) -> tuple[int, int, int]:
        """Encode the changes in a message, and advance the base.

        Returns:
            Bytes of the payload; sum of the new terms minus the old ones, modulo 2^64; number of changed elements.
        """
        return _C.encode_delta(table, pack, number, sources, base, payload, self._threads)

    def read(self, table: _C.DeltaTable, number: int, places: np.ndarray) -> int:
        """Return the sum of the terms of a message's elements, read from storages."""
        return table.read(number, places, 0, self._threads)

    def apply(self, table: _C.DeltaTable, number: int, payload: int, nbytes: int, places: np.ndarray, *, write: bool) -> int:
        """Return the sum of a payload's new terms minus the old ones; with `write`, also write its elements.

        Raises:
            ValueError: the payload does not fit the message.
        """
        return table.apply(number, payload, nbytes, places, write, self._threads)


class GpuWork:
    """The same as `HostWork` in a GPU's memory. Messages are packed by the copy kernel, including casts.

    Args:
        device: "cuda:0".
        stream: a cudaStream_t as an integer.

    Raises:
        UserError: as `Gpu`.
    """

    def __init__(self, device: str, stream: int, relieve: Relieve) -> None:
        self.device, self._stream = device, stream
        self._gpu = Gpu(int(device.removeprefix("cuda:")), relieve)
        self._done = self._gpu.event()
        self._rooms: dict[Hashable, DeviceBuffer] = {}
        self._tables: dict[int, _C.DeviceDelta] = {}
        self._programs: dict[int, _C.DeviceProgram] = {}

    def room(self, name: Hashable, nbytes: int) -> int:
        if name not in self._rooms or self._rooms[name].nbytes < nbytes:
            # Freeing device memory waits for all of the device's kernels, so allocate a little more than needed.
            self._rooms.pop(name, None)
            self._rooms[name] = self._gpu.allocate(nbytes + (nbytes // 4 if _coded(name) else 0))
        return self._rooms[name].address

    def release(self, *, all_: bool) -> None:
        if all_:
            self._rooms = {name: room for name, room in self._rooms.items() if not _coded(name)}

    def copy(self, to: int, source: int, nbytes: int) -> None:
        _C.copy_plainly(self._gpu.index, to, source, nbytes, self._stream)

    def fill(self, table: _C.DeltaTable, pack: _C.Program, number: int, sources: np.ndarray, base: int) -> int:
        self._pack(pack, number, sources, base)
        there = self._there(table)
        there.read(number, np.empty(0, np.int64), base, self._stream)
        return self._found(there)[1]

    def encode(
        self, table: _C.DeltaTable, pack: _C.Program, number: int, sources: np.ndarray, base: int, payload: int
    ) -> tuple[int, int, int]:
        now = self.room("now", trailer_offset(table.bytes(number)) + TRAILER_BYTES)
        self._pack(pack, number, sources, now)
        there = self._there(table)
        there.encode(number, now, base, payload, self._stream)
        return self._found(there)

    def read(self, table: _C.DeltaTable, number: int, places: np.ndarray) -> int:
        there = self._there(table)
        there.read(number, places, 0, self._stream)
        return self._found(there)[1]

    def apply(self, table: _C.DeltaTable, number: int, payload: int, nbytes: int, places: np.ndarray, *, write: bool) -> int:
        there = self._there(table)
        there.apply(number, payload, nbytes, places, write, self._stream)
        return self._found(there)[1]

    def _pack(self, pack: _C.Program, number: int, sources: np.ndarray, to: int) -> None:
        if id(pack) not in self._programs:
            made = self._gpu.take("tables of copies", None, partial(_C.DeviceProgram, pack, self._gpu.index))
            self._programs[id(pack)] = made
        self._programs[id(pack)].run(number, sources, one_address(to), 0, self._stream)

    def _there(self, table: _C.DeltaTable) -> _C.DeviceDelta:
        if id(table) not in self._tables:
            made = self._gpu.take("tables of deltas", None, partial(_C.DeviceDelta, table, self._gpu.index))
            self._tables[id(table)] = made
        return self._tables[id(table)]

    def _found(self, there: _C.DeviceDelta) -> tuple[int, int, int]:
        self._done.record(self._stream)
        if not self._done.wait(_PATIENCE_S):
            raise WaitTimeout(self.device, "the kernels of a delta enqueued on its stream", _PATIENCE_S)
        return there.take()


Work = HostWork | GpuWork


def work_on(device: str, threads: int, stream: int, relieve: Relieve) -> Work:
    """Return the worker for a device's memory, "cpu" or "cuda:0"; raise as `GpuWork`."""
    return HostWork(threads) if device == "cpu" else GpuWork(device, stream, relieve)


def one_address(address: int) -> np.ndarray:
    return np.array([address], np.uint64).view(np.int64)


def _coded(name: Hashable) -> bool:
    return isinstance(name, tuple) and name[0] == "coded"
