"""Collectives over all ranks of the trainer: tensor reductions in device memory, object exchange in host memory.

With GPUs the default process group is NCCL's, which does not support host tensors, so there is also a gloo group. Collectives without an
explicit group belong only here (a test checks the sources). Collectives elsewhere use groups that Megatron or a publisher created.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from asyncmoe.platform.file_store import open_store
from asyncmoe.rpc.environment import RANKS_STORE

T = TypeVar("T")
_HOSTS: list[dist.ProcessGroup] = []
"""The host group, once `start` has made it."""


def join(backend: str, timeout: timedelta) -> None:
    """Create the default group: torchrun's ranks, or without torchrun this process alone."""
    c10d: Any = dist
    if RANKS_STORE in os.environ:
        store, rank, world = open_store(os.environ[RANKS_STORE]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
    elif "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=c10d.HashStore(), rank=0, world_size=1)


def start(timeout: timedelta) -> None:
    """Create the host group unless it exists; use the default group if it supports host tensors. Collective."""
    if _HOSTS:
        return
    made = dist.group.WORLD if _takes_host() else dist.new_group(backend="gloo", timeout=timeout)
    assert made is not None
    _HOSTS.append(made)


def stop() -> None:
    """Leave all groups, including the default group."""
    _HOSTS.clear()
    dist.destroy_process_group()


def total(tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce all ranks' tensors of equal shape and dtype, by default to their sum; the result is on the device."""
    result = tensor.to(device(), copy=True)
    dist.all_reduce(result, op=operation)
    return result


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of all ranks' tensors in a group; differentiable: the backward pass sums the gradients of all ranks' losses."""
    made: torch.Tensor = _Summed.apply(tensor, group)  # type: ignore[no-untyped-call]
    return made


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _added(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _added(gradients[0], ctx.group), None


def _added(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    result = tensor.clone()
    dist.all_reduce(result, group=group)
    return result


def everyones(mine: T) -> list[T]:
    """Return every rank's object, by rank. Objects must be picklable."""
    said = [mine] * dist.get_world_size()
    dist.all_gather_object(said, mine, group=_HOSTS[0])
    return said


def gathered(mine: T) -> list[T] | None:
    """Return every rank's object, by rank, on rank 0; None elsewhere. Objects must be picklable."""
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, found, dst=0, group=_HOSTS[0])
    return found


def barrier() -> None:
    """Wait for all ranks on the host, but not for pending device work."""
    dist.barrier(group=_HOSTS[0])


def device() -> torch.device:
    """Return the device for tensors of the default group."""
    return torch.device("cpu") if _takes_host() else torch.device("cuda", torch.cuda.current_device())


def _takes_host() -> bool:
    return "cpu:" in dist.get_backend_config()
