"""The common method of sending weights from a trainer to engines: gather whole tensors on trainer ranks, broadcast to all engine ranks.

Packing, unpacking and loading use this package's compiled copies, and rounds repeat no preparation, so the comparison is between
methods, not implementations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

import asyncmoe.reshard._C as _C
from asyncmoe.reshard import Bucket, Plan, RankLayout, buckets, plan, plan_each
from asyncmoe.reshard.chunks import cut_transfer
from asyncmoe.reshard.memory import memory_of
from asyncmoe.reshard.programs import local_rows, message_program
from asyncmoe.reshard.torch_transport import TorchTransport

Shapes = Mapping[str, tuple[int, ...]]
Arrays = dict[str, np.ndarray]


class GatherAndBroadcast:
    """For each bucket, trainer ranks gather it, rank 0 broadcasts it to all engine ranks, and they copy their part.

    Whatever possible is prepared once. All ranks of the default group create one.

    Args:
        whole: layout of the Hugging Face tensors.
        bucket_bytes: 1 makes every tensor a bucket of its own.
        everywhere: gather on every trainer rank, as an all-gather over tensor- and expert-parallel groups does; else on rank 0 alone.
        timeout_s: longest wait for another rank.
    """

    def __init__(
        self,
        shapes: Shapes,
        whole: RankLayout,
        source: Sequence[RankLayout],
        destination: Sequence[RankLayout],
        held: Arrays,
        wanted: Arrays,
        bucket_bytes: int,
        everywhere: bool,
        timeout_s: float,
    ) -> None:
        self._rank = dist.get_rank()
        engines = [layout.rank for layout in destination]
        self._broadcast = dist.new_group([0, *engines])
        self._in_broadcast = self._rank in (0, *engines)
        self._buckets = buckets(whole, bucket_bytes)
        gatherers = [layout.rank for layout in source] if everywhere else [0]
        self._flat: list[torch.Tensor | None] = [None] * len(self._buckets)
        self._gathers: list[_Gather] = []
        self._loads: list[np.ndarray] = []
        largest = max(bucket.nbytes for bucket in self._buckets)
        if self._rank in (*gatherers, *engines):
            memory = torch.empty(largest, dtype=torch.uint8)
            self._flat = [memory[: bucket.nbytes] for bucket in self._buckets]
        if self._rank not in engines:
            arena, transport = _Arena(), TorchTransport()
            wishes = [[bucket.layout.at(rank) for rank in gatherers] for bucket in self._buckets]
            for made, flat in zip(plan_each(shapes, source, wishes, ranks=[self._rank]), self._flat, strict=True):
                self._gathers.append(_Gather(made, self._rank, transport, arena, held, flat, timeout_s))
        else:
            mine = next(layout for layout in destination if layout.rank == self._rank)
            self._loads = _loading(shapes, self._buckets, mine)
        self._addresses = np.array([memory_of(array, name).address for name, array in wanted.items()], np.int64)

    def run(self) -> None:
        for number, flat in enumerate(self._flat):
            if self._gathers:
                self._gathers[number].run()
            if flat is not None and self._in_broadcast:
                dist.broadcast(flat, 0, group=self._broadcast)
            if flat is not None and self._loads:
                _C.copy(self._loads[number], np.array([flat.data_ptr()], np.int64), self._addresses, 1)

    def close(self) -> None:
        dist.destroy_process_group(self._broadcast)


class _Arena:
    """Message buffers that all gathers of a rank share, as only one of them runs at a time."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def take(self, number: int, nbytes: int) -> None:
        while len(self._buffers) <= number:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if len(self._buffers[number]) < nbytes:
            self._buffers[number] = torch.empty(nbytes, dtype=torch.uint8)

    def view(self, number: int, nbytes: int) -> torch.Tensor:
        return self._buffers[number][:nbytes]


class _Gather:
    """Gathers one bucket: each pair of ranks exchanges one message."""

    def __init__(
        self, made: Plan, rank: int, transport: TorchTransport, arena: _Arena, held: Arrays, flat: torch.Tensor | None, timeout_s: float
    ) -> None:
        remote = [cut_transfer(made, t, 2 * t.nbytes + 4096) for t in made.transfers if t.source != t.destination]
        remote = [chunks for chunks in remote if rank in (chunks.source, chunks.destination)]
        self._packing = [chunks.source == rank for chunks in remote]
        self._peers = [chunks.destination if out else chunks.source for chunks, out in zip(remote, self._packing, strict=True)]
        self._nbytes = [sum(chunks.nbytes) for chunks in remote]
        self._programs = [message_program(c, "destination" if out else "source") for c, out in zip(remote, self._packing, strict=True)]
        self._rows, _ = local_rows([t.copies for t in made.transfers if rank == t.source == t.destination])
        self._transport, self._arena, self._timeout_s = transport, arena, timeout_s
        self._from = np.array([memory_of(held[name], name).address for name in made.sources.get(rank, {})], np.int64)
        self._to = np.array([] if flat is None else [flat.data_ptr()], np.int64)
        for number, nbytes in enumerate(self._nbytes):
            arena.take(number, nbytes)

    def run(self) -> None:
        buffers = [self._arena.view(number, nbytes) for number, nbytes in enumerate(self._nbytes)]
        messages = [(peer, buffer) for peer, buffer in zip(self._peers, buffers, strict=True)]
        self._copy(buffers, packing=True)
        sends = [message for message, out in zip(messages, self._packing, strict=True) if out]
        receives = [message for message, out in zip(messages, self._packing, strict=True) if not out]
        self._transport.exchange(sends, receives, self._timeout_s)
        if len(self._rows):
            _C.copy(self._rows, self._from, self._to, 1)
        self._copy(buffers, packing=False)

    def _copy(self, buffers: list[torch.Tensor], *, packing: bool) -> None:
        for program, buffer, out in zip(self._programs, buffers, self._packing, strict=True):
            message = np.array([buffer.data_ptr()], np.int64)
            for chunk in range(program.chunks if out == packing else 0):
                program.run(chunk, self._from if out else message, message if out else self._to, 1)


def _loading(shapes: Shapes, parts: Sequence[Bucket], mine: RankLayout) -> list[np.ndarray]:
    """For each bucket, the copies of an engine rank's part into its parameters."""
    storages = {str(i): part.layout.storages["bucket"] for i, part in enumerate(parts)}
    pieces = tuple(replace(piece, storage=str(i)) for i, part in enumerate(parts) for piece in part.layout.pieces)
    made = plan(shapes, [RankLayout(mine.rank, storages, pieces)], [mine])
    used = [int(name) for name in made.sources[mine.rank]]
    rows, _ = local_rows([transfer.copies for transfer in made.transfers])
    number = np.array([*used, -1])[rows[:, 0]]
    loads = []
    for i in range(len(parts)):
        chosen = rows[(number == i) | ((number < 0) & (i == 0))]
        chosen[:, 0] = np.minimum(chosen[:, 0], 0)
        loads.append(chosen)
    return loads
