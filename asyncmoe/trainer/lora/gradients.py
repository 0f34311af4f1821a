"""Marks adapter parameters for Megatron, and computes the gradient sums over ranks that Megatron does not.

Megatron reads attributes of parameters: `allreduce` (False: expert data parallelism applies), `sequence_parallel` (`finalize_model_grads`
sums the gradients of copies over tensor-parallel ranks), `tensor_model_parallel` and `shared` (whether a rank's part counts in the global
gradient norm).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe.models.lora.halves import Half
from asyncmoe.platform import megatron

megatron.prepare()

from megatron.core import parallel_state as groups  # noqa: E402  only after the platform is prepared


def mark(parameter: torch.nn.Parameter, half: Half) -> None:
    """Mark how Megatron treats the gradient of a half."""
    marks = {
        "allreduce": not half.expert_data,
        "sequence_parallel": half.partial == "tp",
        "tensor_model_parallel": half.counted,
        "partition_dim": -1 if half.axis is None else half.axis + (half.experts is not None),
        "partition_stride": 1,
        # Megatron would count undivided parameters on the first tensor-parallel rank; copies of experts' halves are placed differently.
        "shared": not half.counted,
    }
    for name, value in marks.items():
        setattr(parameter, name, value)


def finalizing(original: Callable[..., None], copies: Callable[[], Iterator[Any]]) -> Callable[..., None]:
    """Return Megatron's `finalize_model_grads_func` followed by the sums over expert-tensor-parallel ranks.

    By then gradients are already summed over data-parallel ranks, perhaps during the backward pass; if the optimizer state is sharded,
    each rank has the sums of its own shard only. Ranks with copies of a half shard it identically, so the sums of sums are right wherever
    they are used.

    Args:
        copies: returns a rank's parameters whose `Half.partial` is "etp".
    """

    def finalize(model: list[Any], *arguments: Any, **keywords: Any) -> None:
        original(model, *arguments, **keywords)
        _sum_over_expert_tensor_ranks([parameter.main_grad for parameter in copies()])

    return finalize


def _sum_over_expert_tensor_ranks(gradients: Sequence[torch.Tensor]) -> None:
    group: dist.ProcessGroup = groups.get_expert_tensor_parallel_group()
    if group.size() == 1 or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
