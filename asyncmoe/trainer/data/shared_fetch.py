"""One rank of a tensor- and context-parallel group fetches trajectories and broadcasts them to the others.

All ranks of the group train on the same trajectories with the same layers, so each trajectory is sent once per group. On GPUs Megatron's
group broadcasts only tensors in device memory, so the bytes are copied there part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.errors import AsyncmoeError, ProtocolError
from asyncmoe.trajectory import Buffer

if TYPE_CHECKING:  # imports Megatron
    from asyncmoe.trainer.model.mesh import Mesh

PART_BYTES = 64 << 20
"""Device memory used by a broadcast."""
ALIGNED = 16
"""Alignment of each buffer in bytes, because arrays are made from buffers in place."""


def joined(sizes: Sequence[int], buffers: Sequence[Buffer] | None = None) -> tuple[np.ndarray, Sequence[memoryview]]:
    """Return one array to broadcast, uint8[n], and read-only views of the given sizes in it, filled from `buffers`; uninitialised without
    them."""
    starts = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
    places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    whole = np.empty(starts[-1], np.uint8)
    into = memoryview(whole.data).cast("B")
    for place, one in zip(places, buffers or (), strict=False):
        into[place] = memoryview(one).cast("B")
    return whole, [into.toreadonly()[place] for place in places]


def shared(mesh: Mesh, count: int, ask: Callable[[], Sequence[Buffer]]) -> Sequence[Buffer]:
    """Return the result of `ask` on the group's first rank. Collective over `Mesh.replica_group`.

    Args:
        count: number of buffers, the same on all ranks.
        ask: called on the first rank only; returns `count` buffers.

    Raises:
        AsyncmoeError: raised by `ask`, on the first rank; on the others a `ProtocolError` with its text.
    """
    if mesh.tp * mesh.cp == 1:
        return ask()
    found: Sequence[Buffer] = [b""] * (count + 1)  # the last buffer is the error text
    failure: AsyncmoeError | None = None
    if mesh.fetches:
        try:
            found = [*ask(), b""]
        except AsyncmoeError as error:
            failure, found = error, [*found[1:], str(error).encode()]
    sizes = torch.tensor([memoryview(one).nbytes for one in found], dtype=torch.int64, device=mesh.device)
    _broadcast(mesh, sizes)
    *each, why = _spread(mesh, *joined(sizes.tolist(), found if mesh.fetches else None))
    if len(why):
        raise failure or ProtocolError(f"rank {_first(mesh)} could not fetch the batch: {bytes(why).decode()}")
    return each


def _spread(mesh: Mesh, whole: np.ndarray, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
    """Broadcast the first rank's `whole` into every rank's, of the same size; return `buffers`."""
    for part in torch.split(torch.from_numpy(whole), PART_BYTES):
        sent = part.to(mesh.device)  # on a CPU this returns the part itself
        _broadcast(mesh, sent)
        if sent is not part and not mesh.fetches:
            part.copy_(sent)
    return buffers


def _broadcast(mesh: Mesh, tensor: torch.Tensor) -> None:
    dist.broadcast(tensor, _first(mesh), group=mesh.replica_group)


def _first(mesh: Mesh) -> int:
    return dist.get_global_rank(mesh.replica_group, 0)
