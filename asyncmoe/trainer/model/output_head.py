"""Makes a model return its output layer's input, for `logprobs`, which multiplies the hidden rows in blocks.

The model returns only rows whose log-probabilities are needed, not those of prompts or tool results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from asyncmoe.platform import megatron

megatron.prepare()

from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)


@dataclass
class OutputHead:
    """The output layer of one forward pass.

    Attributes:
        rows: int64[n]; the rows that the model returns; distinct, ascending, the same on all tensor-parallel ranks. None: all rows.
        weight: [V / tp, H]; this rank's slice of the layer's weight, or of the embedding's if shared. None before the pass.
    """

    rows: torch.Tensor | None
    weight: Any = None

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values [T, ...] of the head's rows: [n, ...]."""
        return values if self.rows is None else values[self.rows]

    def spread(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Return values [n, ...] of the head's rows as [count, ...], 0 elsewhere; differentiable."""
        return values if self.rows is None else values.new_zeros(count, *values.shape[1:]).index_copy(0, self.rows, values)


@contextmanager
def replaced(rows: torch.Tensor | None, chunk: torch.nn.Module) -> Iterator[OutputHead]:
    """Within the context, a forward pass of the chunk returns hidden rows [1, n, H], not logits; the same on all tensor-parallel ranks.

    The layer is still called, because data parallelism gathers its new weight in a hook of that call. In the backward pass the ranks'
    gradients of a row, each for one slice of the vocabulary, are summed once: reduce-scattered under sequence parallelism, which splits
    the rows [T / tp, 1, H]; all-reduced without it.

    Args:
        rows: as `OutputHead.rows`.
        chunk: a bare GPTModel; one without an output layer is left alone.
    """
    head, layer = OutputHead(rows), getattr(chunk, "output_layer", None)
    if layer is None:
        yield head
        return

    def forward(
        hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        head.weight = layer.weight if weight is None else weight
        return _rows(layer, hidden, rows), None

    layer.forward = forward  # on the instance, hiding the class's
    try:
        yield head
    finally:
        del layer.forward


def _rows(layer: Any, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return the selected rows, [n, 1, H], of [T / tp, 1, H] or [T, 1, H]."""
    if layer.sequence_parallel:
        whole: torch.Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=layer.tp_group)
    else:
        whole = copy_to_tensor_model_parallel_region(hidden, group=layer.tp_group)
    return whole if rows is None else whole.index_select(0, rows)
