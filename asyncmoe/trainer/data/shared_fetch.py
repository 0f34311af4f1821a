"""One rank of a tensor-parallel group fetches; the others get it from that rank.

All ranks of such a group train on the same trajectories with the same layers, so the controller sends them once a group. Megatron's group
takes tensors in device memory only if there are GPUs; bytes then pass through it in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from asyncmoe.trainer.model.mesh import Mesh
from asyncmoe.trajectory import Buffer

PART_BYTES = 64 << 20
"""Device memory that a broadcast takes."""
ALIGNED = 16


def shared(mesh: Mesh, count: int, ask: Callable[[], Sequence[Buffer]]) -> Sequence[Buffer]:
    """Return what `ask` returns on the group's first rank. Collective over the tensor-parallel group.

    Args:
        count: number of buffers, the same on all ranks.
        ask: called on the first rank only. What it raises is raised there alone, as an error of any other collective would be.
    """
    if mesh.tp == 1:
        return ask()
    buffers = [memoryview(one).cast("B") for one in ask()] if mesh.tp_rank == 0 else []
    sizes = torch.tensor([len(one) for one in buffers] or [0] * count, dtype=torch.int64, device=mesh.device)
    _broadcast(mesh, sizes)
    places = places_of(sizes.tolist())
    whole = torch.empty(places[-1].stop, dtype=torch.uint8)
    view = memoryview(whole.numpy().data).cast("B")
    for one, place in zip(buffers, places, strict=False):
        view[place] = one
    for part in torch.split(whole, PART_BYTES):
        sent = part.to(mesh.device)  # on a CPU the part itself
        _broadcast(mesh, sent)
        if mesh.tp_rank and sent is not part:
            part.copy_(sent)
    return [view[place].toreadonly() for place in places]


def places_of(sizes: Sequence[int]) -> list[slice]:
    """Return where buffers of some sizes lie in one: each begins at a multiple of `ALIGNED`, as arrays are made of them in place."""
    starts = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def _broadcast(mesh: Mesh, tensor: torch.Tensor) -> None:
    dist.broadcast(tensor, dist.get_global_rank(mesh.tp_group, 0), group=mesh.tp_group)
