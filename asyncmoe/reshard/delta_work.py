"""Who compares, proves, writes and reads the elements of deltas in host memory, and what a sender or receiver asks of whoever does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.reshard.delta_format import FRAME_BYTES, HEADER_BYTES, TRAILER_BYTES


@dataclass(frozen=True, slots=True)
class Coded:
    """A message of a delta, whose payload is written: header and digest are still missing.

    Attributes:
        frame: uint8[FRAME_BYTES + payload].
        difference: the new terms of the changed elements less the old ones, modulo 2^64.
        changed, blocks: elements whose bits changed, and blocks that are sent whole.
    """

    frame: np.ndarray
    difference: int
    changed: int
    blocks: int


class Base(Protocol):
    """What was sent last to destinations of one layout, and the program that packs what would be sent now.

    `sources` are the addresses of the source storages, int64.
    """

    def fill(self, number: int, sources: np.ndarray) -> int:
        """Pack a message into the base; return the sum of its elements' terms."""

    def encode(self, number: int, sources: np.ndarray) -> Coded:
        """Code what a message would change."""

    def advance(self, number: int, message: np.ndarray) -> int:
        """Write a message without a fault into the base; return the new terms less the old ones."""


class Elements(Protocol):
    """The elements of the messages of one table, as they lie in storages. `places` are the addresses of the storages, int64."""

    def read(self, number: int, places: np.ndarray) -> int:
        """Return the sum of the terms of a message's elements."""

    def apply(self, number: int, message: np.ndarray, places: np.ndarray, *, write: bool) -> int:
        """Return the new terms less the old ones of a message, uint8[n], that had no fault when it was staged; write it if asked.

        Raises:
            ValueError: it has one now.
            OutOfDeviceMemory: there is no room for it on the GPU.
        """


class HostBase:
    """A base in host memory, of sources in host memory.

    Attributes:
        base: uint8[bytes of all messages], one after another.
    """

    def __init__(self, pack: _C.Program, table: _C.DeltaTable, nbytes: Sequence[int], threads: int) -> None:
        self._pack, self._table, self._threads = pack, table, threads
        self._begins: list[int] = np.cumsum([0, *nbytes]).tolist()
        self.base = np.empty(self._begins[-1], np.uint8)

    def fill(self, number: int, sources: np.ndarray) -> int:
        return _C.fill_delta_base(self._table, self._pack, number, sources, self._address(number), self._threads)

    def encode(self, number: int, sources: np.ndarray) -> Coded:
        place = self._address(number), HEADER_BYTES, TRAILER_BYTES
        return Coded(*_C.encode_delta(self._table, self._pack, number, sources, *place, self._threads))

    def advance(self, number: int, message: np.ndarray) -> int:
        place = np.array([self._address(number)], np.uint64).view(np.int64)
        return HostElements(self._table, self._threads).apply(number, message, place, write=True)

    def _address(self, number: int) -> int:
        return int(self.base.ctypes.data) + self._begins[number]


class HostElements:
    """Elements in host memory."""

    def __init__(self, table: _C.DeltaTable, threads: int) -> None:
        self._table, self._threads = table, threads

    def read(self, number: int, places: np.ndarray) -> int:
        return self._table.read(number, places, self._threads)

    def apply(self, number: int, message: np.ndarray, places: np.ndarray, *, write: bool) -> int:
        return self._table.apply(number, *payload_of(message), places, write, self._threads)


def payload_of(message: np.ndarray) -> tuple[int, int]:
    """Return address and bytes of the payload of a whole message, uint8[n]."""
    return int(message.ctypes.data) + HEADER_BYTES, len(message) - FRAME_BYTES
