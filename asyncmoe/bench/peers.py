"""What others do to bring weights from a trainer to engines: gather whole tensors on one rank, then broadcast them.

The gather and the loading use this package's compiled copies, so what is compared is the way, not the implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

import asyncmoe.reshard._C as _C
from asyncmoe.reshard import Bucket, Exchanger, RankLayout, buckets, plan, plan_each
from asyncmoe.reshard.exchange import local_rows
from asyncmoe.reshard.memory import memory_of
from asyncmoe.reshard.torch_transport import TorchTransport

Shapes = Mapping[str, tuple[int, ...]]
Arrays = dict[str, np.ndarray]


class GatherAndBroadcast:
    """Bucket after bucket: trainer ranks bring it together on rank 0, which broadcasts it to all engine ranks, which take their part.

    Everything that can be is prepared once. All ranks of the default group make one.

    Args:
        whole: layout of the Hugging Face tensors.
        bucket_bytes: 1 makes every tensor a bucket of its own.
        timeout_s: how long a rank waits for another.
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
        timeout_s: float,
    ) -> None:
        self._rank = dist.get_rank()
        engines = [layout.rank for layout in destination]
        self._broadcast = dist.new_group([0, *engines])
        self._buckets = buckets(whole, bucket_bytes)
        self._flat: list[torch.Tensor | None] = [None] * len(self._buckets)
        self._gathers: list[Exchanger] = []
        self._loads: list[np.ndarray] = []
        self._wanted = wanted
        transport = TorchTransport()
        largest = max(bucket.nbytes for bucket in self._buckets)
        if self._rank in (0, *engines):
            memory = torch.empty(largest, dtype=torch.uint8)
            self._flat = [memory[: bucket.nbytes] for bucket in self._buckets]
        if self._rank not in engines:
            for made, flat in zip(plan_each(shapes, source, [[b.layout] for b in self._buckets]), self._flat, strict=True):
                gather = Exchanger(made, transport, bucket_bytes=2 * largest + 4096, buffers=1, timeout_s=timeout_s, threads=1)
                gather.bind(held, {} if flat is None else {"bucket": flat})
                self._gathers.append(gather)
        else:
            mine = next(layout for layout in destination if layout.rank == self._rank)
            self._loads = _loading(shapes, self._buckets, mine)
        self._addresses = np.array([memory_of(array, name).address for name, array in wanted.items()], np.int64)

    def run(self) -> None:
        for number, flat in enumerate(self._flat):
            if self._gathers:
                self._gathers[number].run()
            if flat is not None:
                dist.broadcast(flat, 0, group=self._broadcast)
            if self._loads and flat is not None:
                _C.copy(self._loads[number], np.array([flat.data_ptr()], np.int64), self._addresses, 1)

    def close(self) -> None:
        for gather in self._gathers:
            gather.close()
        dist.destroy_process_group(self._broadcast)


def _loading(shapes: Shapes, parts: Sequence[Bucket], mine: RankLayout) -> list[np.ndarray]:
    """For each bucket, the copies of an engine rank's part of it into its parameters."""
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
