"""Execute a plan: pack messages for other ranks, copy within the rank, exchange messages, unpack."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, LayoutError, TransferError
from asyncmoe.reshard.chunks import BUCKET_BYTES, Chunks, cut_transfer, cuts_of, joined, trailer_offset
from asyncmoe.reshard.delta_decoder import DeltaDecoder
from asyncmoe.reshard.delta_encoder import DeltaEncoder
from asyncmoe.reshard.delta_lanes import BLOCK_BYTES
from asyncmoe.reshard.gpu import GpuCopies, Relieve, nothing_to_give
from asyncmoe.reshard.memory import Array, addresses_of, check_apart, memories_of, memory_of, one_device
from asyncmoe.reshard.moved import Moved
from asyncmoe.reshard.plan import Plan
from asyncmoe.reshard.programs import local_program, message_program, scales_of
from asyncmoe.reshard.transport import Buffer, Lane, Link, MessageLink, SharedTransport, Transport, Watch, nothing_to_watch

_RUN_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Exchanger:
    """This rank's part of a plan, prepared once and run any number of times. Every rank of the plan creates one, with equal arguments.

    A transfer too large for one message is cut into several. The constructor allocates up to `buffers` message buffers for every lane (pair
    of ranks and direction). One buffer for each lane takes at most `bucket_bytes` in total, so all of them take at most `buffers *
    bucket_bytes`. With two or more buffers, a message is packed while the previous one is sent. Every message ends with the digest of its
    content, computed during packing and again during unpacking; on a GPU the digests are compared there, and the result is read at the end
    of a run. During a run Python handles messages, not tensors.

    With `delta`, a run may instead move encoded messages (`DeltaEncoder`, `DeltaDecoder`), in the same order through the same buffers; the
    size of each depends on what changed in its boxes, and as many as fit into a buffer travel as one.

    Args:
        transport: the transport of the messages.
        bucket_bytes: see above.
        buffers: maximum number of a lane's messages in flight, at least 1.
        timeout_s: how long to wait for a peer that makes no progress.
        threads: number of threads that copy in host memory; 0: one per core, at most 4.
        stream: the CUDA stream of copies on a GPU, a cudaStream_t as an integer; 0 is the default stream. A run is ordered after the work
            already enqueued on it, so sources may be written there without waiting; when `run` returns, all copies are done. The
            transport must send and receive in the order of this stream (`TorchTransport`: torch's current stream).
        relieve: see `asyncmoe.reshard.gpu.Relieve`.
        delta: whether runs may move encoded messages.
        watch: called twice a second while a separate thread exchanges messages of a `Transport` (see `MessageLink`); an error it raises
            ends the run. A `SharedTransport` itself notices when a peer dies.

    Raises:
        LayoutError: `bucket_bytes` leaves no room for one element in a message.
        WaitTimeout: a peer did not connect in time.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport | SharedTransport,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        buffers: int = 2,
        timeout_s: float = 300.0,
        threads: int = 0,
        stream: int = 0,
        relieve: Relieve = nothing_to_give,
        delta: bool = False,
        watch: Watch = nothing_to_watch,
    ) -> None:
        self._relieve, self._watch = relieve, watch
        self._buffers, self._threads, self._stream, self._timeout_s = buffers, threads, stream, timeout_s
        self.rank, self._plan, self._of_plan = transport.rank, plan, int(plan.digest[:16], 16)
        cuts = cuts_of(plan, bucket_bytes)
        mine = [t for t in plan.transfers if self.rank in (t.source, t.destination)]
        most = BLOCK_BYTES if delta else None
        cut = [cut_transfer(plan, t, *cuts[t.source, t.destination], most=most) for t in mine if t.source != t.destination]
        self._outgoing = [chunks for chunks in cut if chunks.source == self.rank]
        self._incoming = [chunks for chunks in cut if chunks.destination == self.rank]
        sent = [t.copies for t in mine if t.source == self.rank]
        self._scales = scales_of(plan.sources.get(self.rank, {}), sent)
        self._packs = [message_program(chunks, "destination", self._scales) for chunks in self._outgoing]
        self._unpacks = [message_program(chunks, "source") for chunks in self._incoming]
        self._local = local_program([t.copies for t in mine if t.source == t.destination], self._scales)
        self._sources = self._destinations = addresses_of(())
        self._gpu: GpuCopies | None = None
        self._bound: object = None
        self._runs = 0
        self._until = math.inf
        self._broken = self._closed = False
        self._transport = transport
        out = [_lane(chunks, chunks.destination, delta) for chunks in self._outgoing]
        into = [_lane(chunks, chunks.source, delta) for chunks in self._incoming]
        self.buffer_bytes = sum(lane.slot_bytes * min(self._buffers, len(lane.message_bytes)) for lane in (*out, *into))
        """Bytes of this rank's message buffers."""
        self._link = self._connect(transport, out, into)
        self._whole = self._lanes = out, into
        self._sent_as = self._received_as = list[list[range]]()  # the coded messages in each message of each lane

    def bind(self, source_arrays: Mapping[str, Array] | None = None, destination_arrays: Mapping[str, Array] | None = None) -> None:
        """Set the arrays of the storages for all following runs. They are kept alive until the next `bind`.

        Args:
            source_arrays: arrays by storage name, for all storages of `plan.sources[rank]`, and for the scales of storages that are
                quantised while they are packed (`asyncmoe.reshard.float8`); None if this rank is not a source.
            destination_arrays: arrays by storage name, for all storages of `plan.destinations[rank]`; they are written.

        Arrays have the dtype and the shape of their storages, except for raw bits (`asyncmoe.reshard.memory.storage_memory`). They and the
        messages must all be in host memory or all on one GPU.

        Raises:
            LayoutError: an array is missing, does not match its storage, or is written and shares memory with another one; or arrays are
                given to a rank that is not in the plan.
        """
        self._check_usable()
        read = {**self._plan.sources.get(self.rank, {}), **self._scales.storages}
        sources = memories_of(read, source_arrays, f"rank {self.rank}: source array", write=False)
        wanted = self._plan.destinations.get(self.rank, {})
        destinations = memories_of(wanted, destination_arrays, f"rank {self.rank}: destination array", write=True)
        check_apart(sources, destinations)
        if (source_arrays or destination_arrays) and self.rank not in (known := self._plan.match.ranks):
            raise LayoutError(f"rank {self.rank} of the transport", got="arrays", expected=f"none: the plan's ranks are {known}"[:200])
        messages = [self._link.device] if self._outgoing or self._incoming else []
        arrays = (memory.device for memory in (*sources.values(), *destinations.values()))
        self._prepare(one_device([*messages, *arrays], "arrays of an exchange"))
        self._sources, self._destinations = addresses_of(sources.values()), addresses_of(destinations.values())
        self._bound = (source_arrays, destination_arrays)

    def run(self, timeout_s: float | None = None, encoder: DeltaEncoder | None = None, decoder: DeltaDecoder | None = None) -> Moved:
        """Exchange once. All ranks of the plan call it: all with an encoder, a decoder or both, to move encoded messages, or all without.

        Args:
            timeout_s: limit on the whole run, though a round that began in time may take as long once more; None: no limit while peers make
                progress.
            encoder: sends its latest delta. Encoder and decoder must be made for the same plan and buckets.
            decoder: stores the received messages, of the sizes that it expects; nothing is written to the destination.

        Raises:
            TransferError: a message arrived corrupted, or a peer is gone; names the ranks. The destination may be partly written, and this
                exchanger cannot be used again. In encoded messages only `DeltaDecoder.prove` detects corruption.
            WaitTimeout: a peer made no progress in time; the destination and the exchanger are left as after a TransferError.
        """
        self._check_usable()
        if self._bound is None:
            raise InvariantBroken(f"rank {self.rank}: an exchange was run without arrays; call bind first")
        self._until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._broken = True
        moved = Moved()
        self._resize(encoder, decoder)
        rounds = max((len(lane.message_bytes) for lane in (*self._lanes[0], *self._lanes[1])), default=0)
        ahead = min(self._buffers - 1, rounds)
        for number in range(max(1, rounds + ahead)):
            if number < rounds:
                self._pack_round(number, moved, encoder)
            if number == 0 and encoder is None and decoder is None:
                self._copy_local(moved)
            if number >= ahead:
                self._unpack_round(number - ahead, moved, decoder)
        with moved.timed("wire"):
            self._link.finish(self._patience())
        with moved.timed("unpack"):
            self._check_gpu()
        self._runs += 1
        self._broken = False
        return moved

    def close(self) -> None:
        """Free the message buffers and the transport's resources; after a failed run, end its pending messages."""
        idle, self._broken = not self._broken, True
        if not self._closed and (end := getattr(self._transport, "end", None)) is not None:
            end(idle)  # before the buffers are freed
        self._closed = True
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed or self._broken:
            state = "is closed" if self._closed else "failed before"
            raise InvariantBroken(f"rank {self.rank}: an exchanger that {state} was used again; make a new one")

    def _copy_local(self, moved: Moved) -> None:
        if self._local is not None:
            with moved.timed("local"):
                self._copy(self._local, 0, self._sources, self._destinations)
            moved.local = self._local.bytes(0)

    def _resize(self, encoder: DeltaEncoder | None, decoder: DeltaDecoder | None) -> None:
        """Set the sizes of a run's messages."""
        out, into = self._whole
        if encoder is not None:
            out, self._sent_as = self._coded(out, encoder)
        if decoder is not None:
            into, self._received_as = self._coded(into, decoder)
        if self._lanes != (out, into):
            self._lanes = out, into
            self._link.resize(out, into)

    def _coded(self, lanes: list[Lane], codec: DeltaEncoder | DeltaDecoder) -> tuple[list[Lane], list[list[range]]]:
        """Return the lanes of encoded messages, and which encoded messages each message of a lane joins."""
        found, parts = [], []
        for lane in lanes:
            sizes = codec.sizes(lane.peer)
            if len(sizes) != len(lane.message_bytes) or max(sizes) > lane.slot_bytes:
                raise InvariantBroken(f"rank {self.rank}: got coded messages of another plan or bucket size than the exchange's")
            parts.append(joined(sizes, lane.slot_bytes))
            found.append(replace(lane, message_bytes=tuple(sum(sizes[part.start : part.stop]) for part in parts[-1])))
        return found, parts

    def _pack_round(self, number: int, moved: Moved, encoder: DeltaEncoder | None) -> None:
        for lane, (chunks, program) in enumerate(zip(self._outgoing, self._packs, strict=True)):
            if number >= len(self._lanes[0][lane].message_bytes):
                continue
            with moved.timed("wire"):
                buffer = self._link.pack_into(lane, number, self._patience())
            with moved.timed("pack"):
                message = _address(buffer)
                if encoder is not None:
                    address = int(message[0])
                    for part in self._sent_as[lane][number]:
                        address += encoder.put(chunks.destination, part, address)
                elif (digest := self._copy(program, number, self._sources, message)) is not None:
                    _trailer(message, chunks.nbytes[number]).value = self._sealed(digest, number)
            self._link.post(lane, number)
            moved.sent += self._lanes[0][lane].message_bytes[number]
        with moved.timed("wire"):
            self._link.close_round(number, self._patience())

    def _unpack_round(self, number: int, moved: Moved, decoder: DeltaDecoder | None) -> None:
        for lane, (chunks, program) in enumerate(zip(self._incoming, self._unpacks, strict=True)):
            if number >= len(self._lanes[1][lane].message_bytes):
                continue
            with moved.timed("wire"):
                buffer = self._link.unpack_from(lane, number, self._patience())
            with moved.timed("unpack"):
                message = _address(buffer)
                if decoder is not None:
                    address = int(message[0])
                    for part in self._received_as[lane][number]:
                        address += decoder.take(chunks.source, part, address)
                else:
                    digest = self._copy(program, number, message, self._destinations)
                    if digest is not None and _trailer(message, chunks.nbytes[number]).value != self._sealed(digest, number):
                        raise _damaged(chunks, number)
            self._link.release(lane, number)
            moved.received += self._lanes[1][lane].message_bytes[number]

    def _patience(self) -> float:
        return max(0.001, min(self._timeout_s, self._until - time.monotonic()))

    def _sealed(self, digest: int, number: int) -> int:
        """Make a digest specific to its plan, message and run, so that a stale message cannot pass for a new one, nor a message of other
        layouts for one of this plan."""
        return digest ^ self._of_plan ^ (((self._runs << 32 | number) + 1) * _RUN_MIX & _WORD)

    def _copy(self, program: _C.Program, chunk: int, sources: np.ndarray, destinations: np.ndarray) -> int | None:
        """Run copies; return their digest, or None on a GPU, where the kernel handles the trailer."""
        if self._gpu is None:
            return program.run(chunk, sources, destinations, self._threads)
        self._gpu.run(program, chunk, sources, destinations, self._sealed(0, chunk))
        return None

    def _prepare(self, device: str) -> None:
        """Upload the programs to the device of the arrays."""
        if device == "cpu":
            self._gpu = None
        elif self._gpu is None or self._gpu.device != device:
            programs = [*self._packs, *self._unpacks, *([self._local] if self._local else [])]
            self._gpu = GpuCopies(device, self._stream, programs, self._relieve)

    def _check_gpu(self) -> None:
        """Wait for the copies on a GPU, and raise TransferError if it found a wrong digest."""
        if self._gpu is None:
            return
        self._gpu.finish(self._timeout_s)
        for chunks, program in zip(self._incoming, self._unpacks, strict=True):
            number = self._gpu.mismatch(program)
            if number >= 0:
                raise _damaged(chunks, number)

    def _connect(self, transport: Transport | SharedTransport, out: list[Lane], into: list[Lane]) -> Link:
        if isinstance(transport, SharedTransport):
            return transport.connect(out, into, self._buffers, self._timeout_s)
        return MessageLink(transport, out, into, self._buffers, self._watch)


def exchange(
    plan: Plan,
    transport: Transport | SharedTransport,
    source_arrays: Mapping[str, Array] | None = None,
    destination_arrays: Mapping[str, Array] | None = None,
    *,
    timeout_s: float = 300.0,
    threads: int = 0,
    stream: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Execute this rank's part of a plan once. All ranks of the plan call it, with the same plan.

    For arguments and errors see `Exchanger`, `Exchanger.bind` and `Exchanger.run`.
    """
    with Exchanger(plan, transport, bucket_bytes=bucket_bytes, timeout_s=timeout_s, threads=threads, stream=stream) as exchanger:
        exchanger.bind(source_arrays, destination_arrays)
        exchanger.run()


def _address(buffer: Buffer) -> np.ndarray:
    return addresses_of([memory_of(buffer, "message buffer", write=True)])


def _trailer(message: np.ndarray, nbytes: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(int(message[0]) + trailer_offset(nbytes))


def _damaged(chunks: Chunks, number: int) -> TransferError:
    what = f"message {number + 1} of {len(chunks)} arrived with another digest than it was sent with, or is of another plan"
    return TransferError(chunks.source, chunks.destination, what)


def _lane(chunks: Chunks, peer: int, delta: bool) -> Lane:
    """Return the lane of whole messages; with `delta`, its slots fit encoded ones, which are larger by an entry for each block."""
    entries = _C.DELTA_ENTRY_BYTES * int(np.diff(chunks.firsts).max()) if delta else 0
    return Lane(peer, tuple(chunks.message_bytes(i) for i in range(len(chunks))), chunks.slot_bytes + entries)
