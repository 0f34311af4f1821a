"""What a receiver of deltas holds: the elements of each source's messages, in host memory or on a GPU, and what is staged of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.reshard.delta_format import DeltaHeader
from asyncmoe.reshard.delta_gpu import DeltaGpu, DeviceElements
from asyncmoe.reshard.delta_lanes import DeltaLane
from asyncmoe.reshard.delta_work import Elements, HostElements
from asyncmoe.reshard.gpu import Relieve


@dataclass(eq=False)
class Incoming:
    """The messages of one source rank.

    Attributes:
        sums: of the terms of each message's elements, as they lay in the destination storages when they were read or written last.
        staged: by number, header and bytes of the messages of the next version.
        held: the elements in the destination storages; None: no arrays are bound yet.
    """

    lane: DeltaLane
    table: _C.DeltaTable
    sums: list[int]
    staged: dict[int, tuple[DeltaHeader, np.ndarray]] = field(default_factory=dict)
    held: Elements | None = None

    @property
    def elements(self) -> Elements:
        assert self.held is not None
        return self.held


class HeldMemory:
    """Has the elements of all sources, and the padding, read and written where the destination's arrays are.

    Args:
        padding: the table of the padding, one chunk.
        threads: as for `DeltaReceiver`.

    Attributes:
        padding: its elements.
    """

    def __init__(self, incoming: Sequence[Incoming], padding: _C.DeltaTable, threads: int) -> None:
        self._incoming, self._table, self._threads = incoming, padding, threads
        self._device = ""
        self._gpu: DeltaGpu | None = None
        self.padding: Elements = HostElements(padding, threads)

    def move(self, device: str, stream: int, relieve: Relieve) -> None:
        """Have them read and written on a device, "cpu" or "cuda:0".

        Raises:
            LayoutError, UserError: as `DeltaGpu`.
            OutOfDeviceMemory: the GPU has no room for the tables.
        """
        if device == self._device:
            return
        self._device = ""
        gpu = self._gpu = None if device == "cpu" else DeltaGpu(device, stream, relieve)

        def held(table: _C.DeltaTable) -> Elements:
            return HostElements(table, self._threads) if gpu is None else DeviceElements(gpu, table)

        for one in self._incoming:
            one.held = held(one.table)
        self.padding, self._device = held(self._table), device

    def keep(self, message: np.ndarray, owned: bool) -> np.ndarray:
        """Return a copy of a message, uint8[n], or, if it is `owned`, the message; for a GPU always a copy, in memory that stays in place.
        It is valid until `let_go`. Raise MemoryError if there is none."""
        if self._gpu is None:
            return message if owned else message.copy()
        kept = self._gpu.lend(len(message))
        kept[:] = message
        return kept

    def let_go(self) -> None:
        """Take back the memory of all messages."""
        if self._gpu is not None:
            self._gpu.take_back()
