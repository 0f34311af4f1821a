"""Carrying out a plan: pack what others need, copy what stays, exchange messages, unpack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, LayoutError
from asyncmoe.reshard.layout import MAX_DIMS, Storage
from asyncmoe.reshard.memory import Array, Memory, memory_of, storage_memory
from asyncmoe.reshard.plan import (
    DESTINATION,
    DESTINATION_OFFSET,
    DESTINATION_STRIDES,
    EXTENTS,
    ITEM,
    SOURCE,
    SOURCE_OFFSET,
    SOURCE_STRIDES,
    WIRE_OFFSET,
    Plan,
    Transfer,
)

Buffer = Any
"""Bytes in the transport's kind of memory, as its `empty` returns them."""


class Transport(Protocol):
    """How messages reach other ranks."""

    rank: int

    def empty(self, nbytes: int) -> Buffer:
        """A new message buffer of uint8, in memory this transport can send from."""

    def exchange(self, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]], timeout_s: float) -> None:
        """Send each buffer to its rank and fill each buffer from its rank; at most one message a pair and direction.

        Returns when all buffers may be reused.

        Raises:
            asyncmoe.errors.WaitTimeout: naming the rank that was not there in time.
        """


class LocalTransport:
    """One process: nothing travels."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def empty(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def exchange(self, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]], timeout_s: float) -> None:
        others = sorted({rank for rank, _ in (*sends, *receives)})
        if others:
            raise InvariantBroken(f"a plan for ranks {[self.rank, *others]} was given to the transport of one process")


def exchange(
    plan: Plan,
    transport: Transport,
    source_arrays: Mapping[str, Array] | None = None,
    destination_arrays: Mapping[str, Array] | None = None,
    *,
    timeout_s: float = 300.0,
    threads: int = 0,
    stream: int = 0,
) -> None:
    """Carry out this rank's part of a plan. All ranks of the plan call it, with the same plan.

    Args:
        source_arrays: by storage name, at least those of `plan.sources[rank]`; None where this rank is no source.
        destination_arrays: the same for `plan.destinations[rank]`; they are written.
        timeout_s: how long to wait for others.
        threads: of copies in host memory; 0: as many as the machine has, at most 4.
        stream: of copies on a GPU, a cudaStream_t as an integer; 0 is the default stream. Kernels are not waited for, so the
            transport has to send in the order of this stream, and so has whoever reads the destination.

    Arrays and messages must all be in host memory or all on one GPU.

    Raises:
        LayoutError: an array is missing or is not what its storage says.
        WaitTimeout: from the transport.
    """
    rank = transport.rank
    sources = _memories(plan.sources.get(rank, {}), source_arrays or {}, f"rank {rank}: source", write=False)
    destinations = _memories(plan.destinations.get(rank, {}), destination_arrays or {}, f"rank {rank}: destination", write=True)
    sending = [t for t in plan.transfers if t.source == rank and t.destination != rank]
    receiving = [t for t in plan.transfers if t.destination == rank and t.source != rank]
    outgoing = [transport.empty(t.nbytes) for t in sending]
    incoming = [transport.empty(t.nbytes) for t in receiving]
    _run(_packing(sending), sources, _buffers(outgoing), threads, stream)
    _run(_staying(plan.transfers, rank), sources, destinations, threads, stream)
    transport.exchange(
        [(t.destination, buffer) for t, buffer in zip(sending, outgoing, strict=True)],
        [(t.source, buffer) for t, buffer in zip(receiving, incoming, strict=True)],
        timeout_s,
    )
    _run(_unpacking(receiving), _buffers(incoming), destinations, threads, stream)


def _memories(storages: Mapping[str, Storage], arrays: Mapping[str, Array], what: str, *, write: bool) -> list[Memory]:
    missing = [name for name in storages if name not in arrays]
    if missing:
        raise LayoutError(f"{what} array {missing[0]}", got="nothing", expected=f"an array for each of {len(storages)} storages")
    return [storage_memory(arrays[name], storage, f"{what} array {name}", write=write) for name, storage in storages.items()]


def _buffers(buffers: Iterable[Buffer]) -> list[Memory]:
    return [memory_of(buffer, "message buffer", write=True) for buffer in buffers]


def _run(rows: np.ndarray, sources: Sequence[Memory], destinations: Sequence[Memory], threads: int, stream: int) -> None:
    """Run descriptor rows (csrc/copy.h) between memories; nothing to do is fine."""
    if not len(rows):
        return
    devices = sorted({memory.device for memory in (*sources, *destinations)})
    kind, _, index = devices[0].partition(":")
    if len(devices) > 1:
        raise LayoutError("arrays and messages of an exchange", got=" and ".join(devices), expected="all on one device")
    if kind == "cpu":
        _C.copy(rows, _addresses(sources), _addresses(destinations), threads)
    elif _C.CUDA:
        _C.copy_cuda(rows, _addresses(sources), _addresses(destinations), int(index), stream)
    else:
        cure = "build asyncmoe where nvcc is, with ASYNCMOE_CUDA=1"
        raise LayoutError("arrays of an exchange", got=devices[0], expected="cpu, as this build has no CUDA kernels", cure=cure)


def _addresses(memories: Sequence[Memory]) -> np.ndarray:
    return np.array([memory.address for memory in memories], np.uint64).view(np.int64)


Side = tuple[np.ndarray, np.ndarray, np.ndarray]
"""One side of some copies: number of the array, byte offset in it, byte strides."""


def _packing(transfers: Sequence[Transfer]) -> np.ndarray:
    """Rows that copy from storages into one message buffer for each transfer."""
    return _rows([(t, _source(t), _message(t, number)) for number, t in enumerate(transfers)])


def _unpacking(transfers: Sequence[Transfer]) -> np.ndarray:
    """Rows that copy from one message buffer for each transfer into storages."""
    return _rows([(t, _message(t, number), _destination(t)) for number, t in enumerate(transfers)])


def _staying(transfers: Sequence[Transfer], rank: int) -> np.ndarray:
    """Rows that copy from storages to storages of this rank, and fill padding."""
    return _rows([(t, _source(t), _destination(t)) for t in transfers if t.source == t.destination == rank])


def _source(transfer: Transfer) -> Side:
    copies = transfer.copies
    return copies[:, SOURCE], copies[:, SOURCE_OFFSET], copies[:, SOURCE_STRIDES]


def _destination(transfer: Transfer) -> Side:
    copies = transfer.copies
    return copies[:, DESTINATION], copies[:, DESTINATION_OFFSET], copies[:, DESTINATION_STRIDES]


def _message(transfer: Transfer, number: int) -> Side:
    """The boxes in a message, where each lies row-major."""
    copies = transfer.copies
    strides = np.empty((len(copies), MAX_DIMS), np.int64)
    strides[:, -1] = copies[:, ITEM]
    for k in range(MAX_DIMS - 2, -1, -1):
        strides[:, k] = strides[:, k + 1] * copies[:, EXTENTS][:, k + 1]
    return np.full(len(copies), number), copies[:, WIRE_OFFSET], strides


def _rows(parts: Sequence[tuple[Transfer, Side, Side]]) -> np.ndarray:
    """Descriptor rows in the column order of csrc/copy.h."""
    rows = [np.empty((0, _C.COLUMNS), np.int64)]
    for transfer, (source, source_offset, source_strides), (target, target_offset, target_strides) in parts:
        item, extents = transfer.copies[:, ITEM], transfer.copies[:, EXTENTS]
        rows.append(np.column_stack([source, source_offset, target, target_offset, item, extents, source_strides, target_strides]))
    return np.ascontiguousarray(np.concatenate(rows))
