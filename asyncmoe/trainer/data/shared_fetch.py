"""One rank of a tensor-parallel group fetches; the others get it from that rank.

All ranks of such a group train on the same trajectories with the same layers, so the controller sends them once a group. Megatron's group
takes tensors in device memory only if there are GPUs; bytes then pass through it in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from asyncmoe.errors import AsyncmoeError, ProtocolError
from asyncmoe.trainer.model.mesh import Mesh
from asyncmoe.trajectory import Buffer

PART_BYTES = 64 << 20
"""Device memory that a broadcast takes."""
ALIGNED = 16


def shared(mesh: Mesh, count: int, ask: Callable[[], Sequence[Buffer]]) -> Sequence[Buffer]:
    """Return what `ask` returns on the group's first rank. Collective over the tensor-parallel group.

    Args:
        count: number of buffers, the same on all ranks.
        ask: called on the first rank only.

    Raises:
        AsyncmoeError: what `ask` raised, on the first rank; on the others a `ProtocolError` with its text.
    """
    if mesh.tp == 1:
        return ask()
    buffers, failure = _asked(count, ask) if mesh.tp_rank == 0 else ([], None)
    why = str(failure).encode() if failure is not None else b""
    lengths = [len(one) for one in buffers] or [0] * count
    sizes = torch.tensor([*lengths, len(why)], dtype=torch.int64, device=mesh.device)
    _broadcast(mesh, sizes)
    *each, told = sizes.tolist()
    if told:
        text = bytes(_spread(mesh, [memoryview(why)], [told])[0])
        raise failure or ProtocolError(f"rank {_first(mesh)} could not fetch the batch: {text.decode()}")
    return _spread(mesh, buffers, each)


def _asked(count: int, ask: Callable[[], Sequence[Buffer]]) -> tuple[list[memoryview], AsyncmoeError | None]:
    try:
        buffers = [memoryview(one).cast("B") for one in ask()]
    except AsyncmoeError as error:
        return [], error
    if len(buffers) != count:
        return [], ProtocolError(f"got a batch of {len(buffers)} frames, expected {count}")
    return buffers, None


def _spread(mesh: Mesh, buffers: Sequence[memoryview], sizes: Sequence[int]) -> Sequence[Buffer]:
    """Return the first rank's buffers, of some sizes, on every rank."""
    places = places_of(sizes)
    whole = torch.empty(places[-1].stop, dtype=torch.uint8)
    view = memoryview(whole.numpy().data).cast("B")
    if mesh.tp_rank == 0:
        for one, place in zip(buffers, places, strict=True):
            view[place] = one
    for part in torch.split(whole, PART_BYTES):
        sent = part.to(mesh.device)  # on a CPU the part itself
        _broadcast(mesh, sent)
        if mesh.tp_rank and sent is not part:
            part.copy_(sent)
    return buffers if mesh.tp_rank == 0 else [view[place].toreadonly() for place in places]


def places_of(sizes: Sequence[int]) -> list[slice]:
    """Return where buffers of some sizes lie in one: each begins at a multiple of `ALIGNED`, as arrays are made of them in place."""
    starts = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def _broadcast(mesh: Mesh, tensor: torch.Tensor) -> None:
    dist.broadcast(tensor, _first(mesh), group=mesh.tp_group)


def _first(mesh: Mesh) -> int:
    return dist.get_global_rank(mesh.tp_group, 0)
