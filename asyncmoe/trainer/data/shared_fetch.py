"""One rank of a tensor- and context-parallel group fetches; the others get it from that rank.

All ranks of such a group train on the same trajectories with the same layers, so the controller sends them once a group. Megatron's group
takes tensors in device memory only if there are GPUs; bytes then pass through it in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from asyncmoe.errors import AsyncmoeError, ProtocolError
from asyncmoe.trainer.data.joined import Joined, empty, joined
from asyncmoe.trainer.model.mesh import Mesh
from asyncmoe.trajectory import Buffer

PART_BYTES = 64 << 20
"""Device memory that a broadcast takes."""


def shared(mesh: Mesh, count: int, ask: Callable[[], Sequence[Buffer] | Joined]) -> Sequence[Buffer]:
    """Return what `ask` returns on the group's first rank. Collective over `Mesh.replica_group`.

    Args:
        count: number of buffers, the same on all ranks.
        ask: called on the first rank only; what is joined already is not copied there.

    Raises:
        AsyncmoeError: what `ask` raised, on the first rank; on the others a `ProtocolError` with its text.
    """
    if mesh.tp * mesh.cp == 1:
        found = ask()
        return found.buffers if isinstance(found, Joined) else found
    ours, failure = _asked(count, ask) if mesh.fetches else (joined([]), None)
    why = str(failure).encode() if failure is not None else b""
    lengths = [len(one) for one in ours.buffers] or [0] * count
    sizes = torch.tensor([*lengths, len(why)], dtype=torch.int64, device=mesh.device)
    _broadcast(mesh, sizes)
    *each, told = sizes.tolist()
    if told:
        text = bytes(_spread(mesh, joined([why]) if mesh.fetches else empty([told])).buffers[0])
        raise failure or ProtocolError(f"rank {_first(mesh)} could not fetch the batch: {text.decode()}")
    return _spread(mesh, ours if mesh.fetches else empty(each)).buffers


def _asked(count: int, ask: Callable[[], Sequence[Buffer] | Joined]) -> tuple[Joined, AsyncmoeError | None]:
    try:
        found = ask()
    except AsyncmoeError as error:
        return joined([]), error
    ours = found if isinstance(found, Joined) else joined(found)
    if len(ours.buffers) != count:
        return joined([]), ProtocolError(f"got a batch of {len(ours.buffers)} frames, expected {count}")
    return ours, None


def _spread(mesh: Mesh, ours: Joined) -> Joined:
    """Fill the buffers of every rank with the first rank's, of the same sizes."""
    for part in torch.split(torch.from_numpy(ours.whole), PART_BYTES):
        sent = part.to(mesh.device)  # on a CPU the part itself
        _broadcast(mesh, sent)
        if sent is not part and not mesh.fetches:
            part.copy_(sent)
    return ours


def _broadcast(mesh: Mesh, tensor: torch.Tensor) -> None:
    dist.broadcast(tensor, _first(mesh), group=mesh.replica_group)


def _first(mesh: Mesh) -> int:
    return dist.get_global_rank(mesh.replica_group, 0)
