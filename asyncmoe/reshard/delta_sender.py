"""The sender of sparse deltas: what it published last, compared with what it would send now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken
from asyncmoe.reshard.delta_digest import WORD, addresses, seeds
from asyncmoe.reshard.delta_format import FRAME_BYTES, DeltaHeader, check_version, seal
from asyncmoe.reshard.delta_gpu import BaseMemory, DeltaGpu, DeviceBase
from asyncmoe.reshard.delta_lanes import MESSAGE_BYTES, DeltaLane, lanes_of
from asyncmoe.reshard.delta_work import Base, HostBase, payload_of
from asyncmoe.reshard.gpu import Relieve, nothing_to_give
from asyncmoe.reshard.layout import MOST_THREADS, whole_number
from asyncmoe.reshard.memory import Array
from asyncmoe.reshard.plan import Plan
from asyncmoe.reshard.programs import message_program, scales_of


@dataclass(frozen=True, slots=True)
class DeltaSize:
    """The size of the delta of one version, as this rank sends it; what several destinations get alike counts once.

    Attributes:
        nbytes: bytes of all messages, frames included.
        changed, elements: elements whose stored bits changed, and all elements.
        dense_bytes: bytes of the dense messages.
        blocks: blocks of at most 128 KiB that are sent whole, because positions and values would take more.
    """

    nbytes: int
    changed: int
    elements: int
    dense_bytes: int
    blocks: int


@dataclass(eq=False)
class _Stream:
    """What one or several destinations are sent alike: destinations of equal layouts get equal messages.

    Attributes:
        kept: the base; None: no arrays are bound yet. Written by `DeltaSender.full` and `commit`.
        sums: of the terms of each message's elements in the base.
        messages, after: of the pending version.
    """

    lane: DeltaLane
    destinations: list[int]
    pack: _C.Program
    table: _C.DeltaTable
    sums: list[int]
    messages: list[np.ndarray]
    after: list[int]
    kept: Base | None = None

    @property
    def base(self) -> Base:
        assert self.kept is not None
        return self.kept


class DeltaSender:
    """This rank's side, as a source, of deltas of a plan's messages.

    It keeps the bytes it published last as they are stored at the destinations, the base: as many as it sends in a full update, once for
    destinations with equal layouts. `encode` compares what it would send now with the base and codes, block by block of at most 128 KiB,
    positions and values of the elements whose bits changed, or all elements where that is smaller. The base advances at `commit` only.
    With float8, values and scales are compared as they are stored (`Scaler.write` comes first, as before an exchange): a changed scale
    counts, and with it every element of its block of 128 x 128 whose stored bits it changes; the others are right already.

    Of arrays on a GPU, kernels compare and code (`asyncmoe.reshard.delta_gpu`); the messages are in host memory and have the same bytes.
    The C++ functions take addresses, as those of `Exchanger` do.

    Args:
        plan: the plan, or its part of this rank.
        message_bytes: a message covers at most so many bytes of the dense message; the same on all ranks.
        threads: threads that compare and copy in host memory; 0: as many as the machine has, at most 4.
        memory: where the base of arrays on a GPU is.
        stream: for arrays on a GPU, the CUDA stream of all copies and kernels, as for `Exchanger`.
        relieve: see `asyncmoe.reshard.gpu.Relieve`.

    Raises:
        LayoutError: `message_bytes` is less than the largest element.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        message_bytes: int = MESSAGE_BYTES,
        threads: int = 0,
        memory: BaseMemory = "device",
        stream: int = 0,
        relieve: Relieve = nothing_to_give,
    ) -> None:
        self.rank, self._memory, self._relieve = whole_number(rank, "rank"), memory, relieve
        self._threads, self._stream = whole_number(threads, "threads", 0, MOST_THREADS), whole_number(stream, "stream")
        lanes = lanes_of(plan, lambda transfer: transfer.source == rank, message_bytes)
        self._scales = scales_of(plan.sources.get(rank, {}), [lane.chunks.copies for lane in lanes])
        self._storages = {**plan.sources.get(rank, {}), **self._scales.storages}
        seed = seeds(plan.match.sources.tensors, ())
        self._streams: list[_Stream] = []
        for lane in lanes:
            self._add(lane, seed)
        self.base_bytes = sum(sum(one.lane.chunks.nbytes) for one in self._streams)
        """Bytes of the base."""
        bounds = [FRAME_BYTES + one.table.bound(i) for one in self._streams for i in range(len(one.lane))]
        self.largest_message, self.largest_delta = max(bounds, default=0), sum(bounds)
        """The most bytes of one message, and of all messages of a version: if everything changes."""
        self.base: int | None = None
        """The version that the base holds; None: none, so that the next update must be full."""
        self._pending: int | None = None
        self._pending_full = False
        self._bound: object = None
        self._device = ""
        self._sources = np.empty(0, np.int64)

    def bind(self, source_arrays: Mapping[str, Array]) -> None:
        """Set the arrays of the storages, as for `Exchanger.bind`. They are kept alive until the next `bind`.

        Takes the memory of the base, when it is called first or with arrays on another device: there is no base then.

        Raises:
            LayoutError: an array is missing, or does not match its storage; they are not all on one device; or they are on a GPU, and this
                build has no CUDA kernels.
            OutOfDeviceMemory: the GPU has no room for the base, or for two messages.
        """
        self._sources, device = addresses(self._storages, source_arrays, f"rank {self.rank}: source array", write=False)
        self._bound = source_arrays
        if device != self._device:
            self._move(device)

    def full(self, version: int) -> None:
        """Make the sources as they are now the pending version, of which the destinations get everything, by an `Exchanger`.

        There is one base: what was in it is overwritten, so if the version is abandoned, the next one must be full as well.
        """
        self._begin(version)
        self.base = None
        for stream in self._streams:
            stream.messages = []
            stream.after = [stream.base.fill(i, self._sources) for i in range(len(stream.lane))]
        self._pending, self._pending_full = version, True

    def encode(self, version: int, *, limit_bytes: int | None = None) -> DeltaSize | None:
        """Code the difference of the sources, as they are now, from the base; it is pending until `commit` or `abandon`.

        Memory: the messages, each exactly as large as it is, one of them twice for a moment, and less than 1 MiB a thread.

        Args:
            version: a number of 64 bits that names the version; destinations that hold another version than `base` refuse the messages.
            limit_bytes: the most that all messages may take.

        Returns:
            What it came to; None if the messages would take more than `limit_bytes`: nothing is pending then; send a full update.

        Raises:
            InvariantBroken: there is no base, a version is pending, or no arrays are bound.
            LayoutError: `version` or `limit_bytes` is out of range.
        """
        self._begin(version)
        if limit_bytes is not None:
            whole_number(limit_bytes, "limit_bytes of a delta")
        if self.base is None or version == self.base:
            raise InvariantBroken(f"rank {self.rank}: got delta {self.base} -> {version}, expected a base and another version after it")
        nbytes = changed = blocks = 0
        for stream in self._streams:
            stream.messages, stream.after = [], []
            for number in range(len(stream.lane)):
                message, after, found, dense = self._code(stream, number, version)
                nbytes, changed, blocks = nbytes + len(message), changed + found, blocks + dense
                if limit_bytes is not None and nbytes > limit_bytes:
                    self._drop()
                    return None
                stream.messages.append(message)
                stream.after.append(after)
        self._pending, self._pending_full = version, False
        elements = sum(stream.lane.element_count for stream in self._streams)
        return DeltaSize(nbytes, changed, elements, self.base_bytes, blocks)

    def messages(self, destination: int) -> Sequence[np.ndarray]:
        """Return the pending delta's messages to a destination, uint8[n] each, in order. Do not write to them. Empty after `commit`."""
        return [message for stream in self._streams if destination in stream.destinations for message in stream.messages]

    def contribution(self, destination: int) -> int:
        """Return the sum of the terms of all elements that this rank sends to a destination, in the pending version, else in the base.

        `asyncmoe.reshard.delta_digest.expected_digest` makes the digest of the destination's shard of those of all its senders.

        Raises:
            InvariantBroken: no version is pending, and there is no base.
        """
        pending = self._pending is not None
        if not pending and self.base is None:
            raise InvariantBroken(f"rank {self.rank}: got no version to digest for rank {destination}, expected full before it")
        mine = [stream for stream in self._streams if destination in stream.destinations]
        return sum(sum(stream.after if pending else stream.sums) for stream in mine) & WORD

    def commit(self) -> None:
        """Make the pending version the base: all destinations have it, or get a full update next.

        Raises:
            InvariantBroken: nothing is pending; or the base, or the messages, changed in memory since they were compared: there is no base
                then, and nothing is pending, so that the next update must be full.
        """
        if self._pending is None:
            raise InvariantBroken(f"rank {self.rank}: got a commit without a version, expected encode or full before it")
        version, self.base = self._pending, None
        if not self._pending_full:
            try:
                for stream in self._streams:
                    self._advance(stream)
            except InvariantBroken:
                self._drop()
                raise
        for stream in self._streams:
            stream.sums = stream.after
        self.base = version
        self._drop()

    def abandon(self) -> None:
        """Forget the pending version, if there is one. The base stays; after `full`, there is none."""
        self._drop()

    def _add(self, lane: DeltaLane, seed: np.ndarray) -> None:
        for stream in self._streams:
            if stream.lane.sends_like(lane):
                stream.destinations.append(lane.destination)
                return
        pack, table = message_program(lane.chunks, "destination", self._scales), lane.sent(seed)
        count = len(lane)
        self._streams.append(_Stream(lane, [lane.destination], pack, table, [0] * count, [], [0] * count))

    def _move(self, device: str) -> None:
        """Take the memory of the base where arrays are on a device."""
        self.abandon()
        self.base, self._device = None, ""
        for stream in self._streams:
            stream.kept = None
        gpu = None if device == "cpu" else DeltaGpu(device, self._stream, self._relieve)
        for one in self._streams:
            what = one.pack, one.table, one.lane.chunks.nbytes
            one.kept = HostBase(*what, self._threads) if gpu is None else DeviceBase(gpu, *what, self._memory)
        self._device = device

    def _begin(self, version: int) -> None:
        if self._pending is not None:
            raise InvariantBroken(f"rank {self.rank}: version {version} was begun while {self._pending} was pending; commit or abandon it")
        if self._bound is None and self._streams:
            raise InvariantBroken(f"rank {self.rank}: version {version} was begun without arrays; call bind first")
        check_version(version)

    def _code(self, stream: _Stream, number: int, version: int) -> tuple[np.ndarray, int, int, int]:
        """Return a message, the sum of the terms after it, its changed elements and its dense blocks."""
        assert self.base is not None
        coded = stream.base.encode(number, self._sources)
        before, payload = stream.sums[number], len(coded.frame) - FRAME_BYTES
        after = (before + coded.difference) & WORD
        header = DeltaHeader(stream.lane.identity, number, len(stream.lane), self.base, version, before, after, payload)
        return seal(coded.frame, header), after, coded.changed, coded.blocks

    def _advance(self, stream: _Stream) -> None:
        for number, message in enumerate(stream.messages):
            whole = stream.table.fault(number, *payload_of(message), self._threads) is None
            difference = stream.base.advance(number, message) if whole else 0
            if not whole or (stream.sums[number] + difference) & WORD != stream.after[number]:
                raise InvariantBroken(
                    f"rank {self.rank}: message {number + 1} to rank {stream.lane.destination}, or its base, changed in memory"
                )

    def _drop(self) -> None:
        self._pending = None
        for stream in self._streams:
            stream.messages, stream.after = [], list(stream.sums)
