"""The backward pass of `logprobs`: recomputes the logits block by block and uses each block's gradient at once.

With z = hidden @ weight.T / temperature, every result is a sum of elements of z and of log-normalisers of rows. The gradient of a log-
normaliser is the softmax of its ids. With g the gradient of z divided by the temperature, that of hidden is g @ weight, that of weight
g.T @ hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncmoe.trainer.model.logit_blocks import LEAST, LogitBlocks, column_in


@dataclass(frozen=True)
class CellGradients:
    """Gradients of z at m cells, ordered by block: each is `shares` times its row's `upstream`.

    Attributes:
        places, ends: as in `logit_blocks.Cells`.
        shares: float32[m].
        upstream: float32[n]; divided by the temperature.
    """

    places: torch.Tensor
    shares: torch.Tensor
    ends: tuple[int, ...]
    upstream: torch.Tensor


@dataclass(frozen=True)
class HeadRows:
    """The n rows whose gradient is computed.

    Attributes:
        hidden: [n, H].
        normaliser: float32[n]; logsumexp of z over the whole vocabulary.
        column: int64[n]; the target, counted from this rank's first id; -1 if another rank has it.
        upstream: float32[n]; gradient of z at the targets, divided by the temperature.
        whole: float32[n]; minus the gradient of the log-normalisers over the whole vocabulary, divided by the temperature.
        cells: further gradients of z.
    """

    hidden: torch.Tensor
    normaliser: torch.Tensor
    column: torch.Tensor
    upstream: torch.Tensor
    whole: torch.Tensor
    cells: Sequence[CellGradients]


def gradients(
    rows: HeadRows, weight: torch.Tensor, scale: float, of_hidden: bool, of_weight: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the hidden rows, [n, H], and of the weight, [v, H], in their dtypes; None for one that is not needed.

    If the weight has `main_grad` (set by Megatron's data parallelism), its gradient is added there, and None is returned.
    """
    blocks = LogitBlocks(rows.hidden, weight, scale)
    hidden = torch.zeros(rows.hidden.shape, dtype=torch.float32, device=weight.device) if of_hidden else None
    straight = of_weight and hasattr(weight, "main_grad")
    into: Any = None
    if of_weight:
        into = getattr(weight, "main_grad", None) if straight else torch.empty_like(weight)
    starts = [0] * len(rows.cells)
    for number, (first, last, block) in enumerate(blocks.each()):
        block.sub_(rows.normaliser[:, None]).clamp_(min=LEAST).exp_().mul_(-rows.whole[:, None])
        inside, place = column_in(rows.column, first, last)
        block.scatter_add_(1, place, torch.where(inside, rows.upstream, 0.0)[:, None])
        for i, cells in enumerate(rows.cells):
            span = slice(starts[i], cells.ends[number])
            starts[i] = span.stop
            places = cells.places[span]
            of_rows = cells.upstream[torch.div(places, last - first, rounding_mode="floor")]
            block.view(-1).index_add_(0, places, cells.shares[span] * of_rows)
        gradient = blocks.rounded(block)
        if hidden is not None:
            _add_product(hidden, gradient, weight[first:last])
        if straight:
            _add_product(into[first:last], gradient.t(), rows.hidden)
        elif of_weight:
            torch.mm(gradient.t(), rows.hidden, out=into[first:last])
    if straight:
        _tell_data_parallelism(weight)
    found = None if hidden is None else hidden.to(rows.hidden.dtype)
    return found, into if of_weight and not straight else None


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to `total`, whose dtype may be wider."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _tell_data_parallelism(weight: Any) -> None:
    """Mark the weight's gradient as added, as Megatron's own layers do when they fuse it (`grad_added_to_main_grad` in
    core/tensor_parallel/layers.py).

    Data parallelism's hook, which runs next, then ignores `grad`, but overlapped reductions require one: a dummy without memory. A
    weight shared with an embedding of the same stage differs: its gradient comes from autograd, and `zero_out_wgrad` makes the hook add it.
    """
    if getattr(weight, "zero_out_wgrad", False):
        return
    weight.grad_added_to_main_grad = True
    weight.grad = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
