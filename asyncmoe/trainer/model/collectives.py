"""What all ranks of the trainer say to each other: sums in their devices' memory, words in that of their hosts.

Between GPUs the default process group is NCCL's, which takes nothing from a host; so there is one group of gloo beside it. Collectives that
name no group belong here and nowhere else (a test reads the sources for them). Others are of groups that Megatron or a sender made.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from asyncmoe.errors import InvariantBroken

T = TypeVar("T")
_HOSTS: list[dist.ProcessGroup] = []


def start(timeout: timedelta) -> None:
    """Make the group between hosts, unless there is one: the default group where that takes tensors of a host. Collective."""
    if _HOSTS:
        return
    made = dist.group.WORLD if _takes_host() else dist.new_group(backend="gloo", timeout=timeout)
    assert made is not None
    _HOSTS.append(made)


def stop() -> None:
    """Leave all groups, the default one too."""
    _HOSTS.clear()
    dist.destroy_process_group()


def total(tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """The sum, or what else, of all ranks' tensors, which are alike: on the device."""
    result = tensor.to(device())
    if result is tensor:
        result = tensor.clone()
    dist.all_reduce(result, op=operation)
    return result


def everyones(mine: T) -> list[T]:
    """What each rank says, by rank. It must be something that pickles."""
    said = [mine] * dist.get_world_size()
    dist.all_gather_object(said, mine, group=_host())
    return said


def barrier() -> None:
    """Wait for all ranks. Hosts do; what their devices still have to do is not waited for."""
    dist.barrier(group=_host())


def device() -> torch.device:
    """Where tensors of the default group are."""
    return torch.device("cpu") if _takes_host() else torch.device("cuda", torch.cuda.current_device())


def _takes_host() -> bool:
    return "cpu:" in dist.get_backend_config()


def _host() -> dist.ProcessGroup:
    if not _HOSTS:
        raise InvariantBroken("ranks have nothing to speak through: asyncmoe.trainer.model.mesh.start comes first")
    return _HOSTS[0]
