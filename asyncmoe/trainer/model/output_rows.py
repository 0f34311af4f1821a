"""Runs the output layer for chosen rows only. Prompts and tool results need no logits, which are a layer's largest output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncmoe.platform import megatron

megatron.prepare()

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region  # noqa: E402


@contextmanager
def only(rows: torch.Tensor | None, chunk: torch.nn.Module) -> Iterator[None]:
    """Within the context, a forward pass of the chunk returns logits [1, n, V / tp] of the rows.

    Args:
        rows: int64[n], distinct, ascending; the same on all tensor-parallel ranks. None: all rows.
        chunk: a bare GPTModel; one without an output layer is left alone.
    """
    layer: Any = getattr(chunk, "output_layer", None)
    if rows is None or layer is None:
        yield
        return
    flags = {name: getattr(layer, name) for name in ("sequence_parallel", "allreduce_dgrad", "disable_grad_reduce")}
    split = flags["sequence_parallel"]

    def choose(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = given
        # Sequence parallelism splits the rows [T / tp, 1, H]: gather, then choose. The gather's backward pass sums the ranks' gradients,
        # each of one slice of the vocabulary, as it scatters them; the layer must not sum them too.
        whole = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=layer.tp_group) if split else hidden
        return whole.index_select(0, rows), *others

    hook = layer.register_forward_pre_hook(choose)
    if split:
        layer.sequence_parallel, layer.allreduce_dgrad, layer.disable_grad_reduce = False, False, True
    try:
        yield
    finally:
        hook.remove()
        for name, flag in flags.items():
            setattr(layer, name, flag)


def spread(values: torch.Tensor, rows: torch.Tensor | None, count: int) -> torch.Tensor:
    """Return values [n] of `rows` as [count], 0 elsewhere; differentiable. `rows` None: all rows."""
    return values if rows is None else values.new_zeros(count).index_copy(0, rows, values)
