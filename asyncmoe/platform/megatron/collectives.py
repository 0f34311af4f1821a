"""Collective calls that NCCL accepts and gloo does not.

Megatron looks up `torch.distributed.<name>` at each call, so replacing the functions there covers every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe.errors import InvariantBroken
from asyncmoe.platform.megatron.patch import wrap


def install() -> None:
    """Replace two collectives of `torch.distributed`; calls that gloo accepts pass through unchanged."""
    wrap(dist, "all_to_all_single", _integer_splits)
    wrap(dist, "all_gather", _uneven_all_gather)


def _integer_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Convert splits to a list of int for gloo; the MoE dispatcher passes tensors or arrays (tensor_parallel/mappings.py `_AllToAll`)."""

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[Any] | None = None,
        input_split_sizes: Sequence[Any] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        return original(output, input, _integers(output_split_sizes), _integers(input_split_sizes), group=group, async_op=async_op)

    return all_to_all_single


def _integers(sizes: Sequence[Any] | None) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]


def _uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pad rows: gloo requires equal counts, but they differ with expert TP > 1 and EP > 1 (mappings.py `_gather_along_first_dim`)."""

    def all_gather(
        tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> Any:
        rows = [part.shape[0] if part.dim() else 1 for part in tensor_list]
        if len(set(rows)) <= 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        if async_op:
            raise InvariantBroken("gloo cannot run all_gather asynchronously on blocks with different row counts")
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in rows]
        original(gathered, padded, group=group)
        for part, full, count in zip(tensor_list, gathered, rows, strict=True):
            part.copy_(full[:count])
        return None

    return all_gather
