"""The sender's half of the delta codec: compares the current data with the data last sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken
from asyncmoe.reshard.chunks import BUCKET_BYTES, TRAILER_BYTES, trailer_offset
from asyncmoe.reshard.delta_lanes import WORD, DeltaLane, lanes_of
from asyncmoe.reshard.delta_work import PAYLOAD, Work, work_on
from asyncmoe.reshard.gpu import Relieve, nothing_to_give
from asyncmoe.reshard.memory import Array, addresses_of, memories_of, one_device
from asyncmoe.reshard.plan import Plan
from asyncmoe.reshard.programs import message_program, scales_of


@dataclass(frozen=True, slots=True)
class DeltaSize:
    """The size of a delta as this rank sends it; data sent to several destinations counts once.

    Attributes:
        nbytes: bytes of all messages.
        changed, elements: number of elements whose stored bits changed, and of all elements.
    """

    nbytes: int
    changed: int
    elements: int


@dataclass(eq=False)
class _Stream:
    """The data sent to one or more destinations.

    Attributes:
        digest: sum of the terms of all elements in the base.
        coded: (address, bytes) of each message of the latest delta.
    """

    lane: DeltaLane
    pack: _C.Program
    digest: int = 0
    base: list[int] = field(default_factory=list)
    coded: list[tuple[int, int]] = field(default_factory=list)


class DeltaEncoder:
    """This rank's side, as a source, of an exchange of deltas.

    It keeps the base: the bytes that it last sent, as they are stored at the destinations. The base is as large as the data of a full
    exchange, but destinations with equal layouts share one copy. `encode` compares the current data with the base and encodes, block by
    block of at most 128 KiB, positions and values of the elements whose bits changed, or all elements where that is smaller;
    `Exchanger.run` sends the messages. With float8, values and scales are compared as stored (call `write_scales` first, as before an
    exchange).

    The base matches the destinations only if they verified and wrote what was sent. Otherwise call `forget`: the next update is then full.

    Args:
        plan: the plan, or this rank's part of it.
        bucket_bytes, threads, stream, relieve: as for the exchange.

    Raises:
        LayoutError: as `lanes_of`.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        threads: int = 0,
        stream: int = 0,
        relieve: Relieve = nothing_to_give,
    ) -> None:
        self.rank = rank
        self._how = threads, stream, relieve
        lanes = lanes_of(plan, lambda transfer: transfer.source == rank, bucket_bytes)
        self._scales = scales_of(plan.sources.get(rank, {}), [lane.chunks.copies for lane in lanes])
        self._storages = {**plan.sources.get(rank, {}), **self._scales.storages}
        self._streams: list[_Stream] = []
        self._stream_to: dict[int, _Stream] = {}  # by destination; those of equal layouts get equal messages
        for lane in lanes:
            alike = next((one for one in self._streams if one.lane.sends_like(lane)), None)
            if alike is None:
                alike = _Stream(lane, message_program(lane.chunks, "destination", self._scales))
                self._streams.append(alike)
            self._stream_to[lane.chunks.destination] = alike
        self.base_bytes = sum(sum(one.lane.chunks.nbytes) for one in self._streams)
        """Size in bytes of the elements in the base."""
        self.base: int | None = None
        """The version in the base; None: there is none, so that the next update must be full."""
        self._elements = sum(one.lane.element_count for one in self._streams)
        self._work: Work | None = None
        self._bound: object = None
        self._sources = np.empty(0, np.int64)

    def bind(self, source_arrays: Mapping[str, Array]) -> None:
        """Set the arrays of the storages, as for `Exchanger.bind`. They are kept alive until the next `bind`.

        The first call, and a call with arrays on another device, allocates memory for the base; there is then no base yet.

        Raises:
            LayoutError: an array is missing or does not match its storage, or the arrays are on several devices.
            UserError: as `GpuWork`.
            MemoryError, OutOfDeviceMemory: there is no room for the base.
        """
        found = memories_of(self._storages, source_arrays, f"rank {self.rank}: source array", write=False)
        device = one_device((memory.device for memory in found.values()), "source arrays of a delta")
        if self._work is None or self._work.device != device:
            self.forget()
            self._work = None
            work = work_on(device, *self._how)
            for number, stream in enumerate(self._streams):
                sizes = [trailer_offset(nbytes) + TRAILER_BYTES for nbytes in stream.lane.chunks.nbytes]
                stream.base = [work.room(("base", number, i), nbytes) for i, nbytes in enumerate(sizes)]
            self._work = work
        self._sources, self._bound = addresses_of(found.values()), source_arrays

    def full(self, version: int) -> None:
        """Copy the current sources into the base, before a full exchange."""
        work = self._begin()
        for stream in self._streams:
            terms = (work.fill(stream.lane.table, stream.pack, i, self._sources, base) for i, base in enumerate(stream.base))
            stream.digest = sum(terms) & WORD
        self.base = version

    def encode(self, version: int, *, limit_bytes: int) -> DeltaSize | None:
        """Encode the difference between the current sources and the base; the base becomes the new version.

        Returns:
            The delta's size; None if the messages exceed `limit_bytes`: the base is then dropped, so send everything.

        Raises:
            InvariantBroken: there is no base, or no arrays are bound.
            MemoryError, OutOfDeviceMemory: there is no memory for the messages; the base is then dropped.
        """
        if self.base is None:
            raise InvariantBroken(f"rank {self.rank}: version {version} was coded without a base; call full first")
        work = self._begin()
        size = self._coded(work, limit_bytes)
        if size is None:
            self.forget()
        else:
            self.base = version
        return size

    def forget(self) -> None:
        """Drop the base, and free the messages."""
        self._let_go(all_=True)

    def digest(self, destination: int) -> int:
        """Return the canonical digest, in the base's version, of the elements that this rank sends to a destination."""
        return self._stream_to[destination].digest if destination in self._stream_to else 0

    def sizes(self, destination: int) -> tuple[int, ...]:
        """Return the sizes in bytes of the latest delta's messages to a destination, in order."""
        return tuple(nbytes for _, nbytes in self._stream_to[destination].coded) if destination in self._stream_to else ()

    def put(self, destination: int, number: int, address: int) -> int:
        """Copy a message of the latest delta to an address on the same device, without waiting; return its size in bytes."""
        assert self._work is not None
        kept, nbytes = self._stream_to[destination].coded[number]
        self._work.copy(address, kept, nbytes)
        return nbytes

    def _coded(self, work: Work, limit_bytes: int) -> DeltaSize | None:
        nbytes = changed = 0
        for number, stream in enumerate(self._streams):
            table = stream.lane.table
            payload = work.room(PAYLOAD, max(map(table.bound, range(len(stream.lane)))))
            for i, base in enumerate(stream.base):
                coded, difference, found = work.encode(table, stream.pack, i, self._sources, base, payload)
                nbytes, changed = nbytes + coded, changed + found
                if nbytes > limit_bytes:
                    return None
                kept = work.room(("coded", number, i), coded)
                work.copy(kept, payload, coded)
                stream.coded.append((kept, coded))
                stream.digest = (stream.digest + difference) & WORD
        return DeltaSize(nbytes, changed, self._elements)

    def _begin(self) -> Work:
        if self._work is None:
            raise InvariantBroken(f"rank {self.rank}: a delta was coded without arrays; call bind first")
        self._let_go(all_=False)
        return self._work

    def _let_go(self, *, all_: bool) -> None:
        self.base = None
        for stream in self._streams:
            stream.coded = []
        if self._work is not None:
            self._work.release(all_=all_)
