"""Log-probabilities of given tokens from hidden rows: the output layer is computed in blocks of the vocabulary, forward and backward.

The logits of all rows never exist together. The forward pass keeps each row's running maximum and sum (Milakov and Gimelshein, "Online
normalizer calculation for softmax", arXiv 1805.02867); the backward pass recomputes each block (`head_gradient`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from asyncmoe.trainer.data.replay_data import Support
from asyncmoe.trainer.model import head_gradient
from asyncmoe.trainer.model.head_gradient import CellGradients
from asyncmoe.trainer.model.logit_blocks import LEAST, Cells, LogitBlocks, column_in


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of n tokens, in float32, the same on every rank of the tensor-parallel group.

    Attributes:
        sampled: [n]; over the ids that the token was sampled from; differentiable.
        whole: [n]; over the whole vocabulary; differentiable. None without supports, when `sampled` is already over the whole vocabulary.
        entropy: [n]; of the softmax over all ids, in nats; not differentiable. None if not requested.
        top: [n, K]; of the requested ids, normalised as `sampled`; differentiable. None if not requested.
    """

    sampled: torch.Tensor
    whole: torch.Tensor | None
    entropy: torch.Tensor | None
    top: torch.Tensor | None = None


def target_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    support: Support | None = None,
    entropy: bool = False,
    top: torch.Tensor | None = None,
) -> LogProbs:
    """Compute each target's log-probability as it was sampled.

    With z = hidden @ weight.T / temperature, and S the ids the target was sampled from, or all ids if a row has no support:

        z[target] - logsumexp of z over S

    ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556 section 3.1). Under Megatron's data parallelism, the backward pass adds the
    weight's gradient to its `main_grad`; see `head_gradient`. The gradient of `hidden` covers only this rank's slice of the vocabulary:
    the code that gathered or copied the rows over the group must sum it.

    Args:
        hidden: float32 or bfloat16 [n, H]; the same on every rank of `group`.
        weight: [V / tp, H], of the same dtype; this rank's slice of the vocabulary, rank r of `group` holding
            [r * V/tp, (r + 1) * V/tp).
        targets: int64[n]; ids in the whole vocabulary, the same on every rank of `group`.
        temperature: the sampling temperature of the tokens.
        group: the tensor-parallel group; None: the vocabulary is whole. Collective over it.
        support: support of the n rows.
        entropy: compute the entropy.
        top: int64[n, K]; further ids of each row, the same on every rank of `group`.
    """
    ids = targets.new_empty(len(targets), 0) if top is None else top
    arguments = (hidden, weight, targets, 1.0 / temperature, group, support, entropy, ids)
    sampled, whole, entropies, of_top = _TargetLogProbs.apply(*arguments)  # type: ignore[no-untyped-call]
    return LogProbs(sampled, None if support is None else whole, entropies if entropy else None, None if top is None else of_top)


class _TargetLogProbs(torch.autograd.Function):
    """Saves the hidden rows; each row's log-normaliser and target; the place and number of each top id; and the place and share of each id
    of a support."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        group: dist.ProcessGroup | None,
        support: Support | None,
        entropy: bool,
        top: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        size, (count, width) = len(weight), top.shape
        start = size * (dist.get_rank(group) if group is not None else 0)
        column = torch.where((targets >= start) & (targets < start + size), targets - start, -1)
        blocks = LogitBlocks(hidden, weight, scale)
        slice_ = start, size, blocks.width
        tops = Cells.of(torch.arange(count, device=top.device).repeat_interleave(width), top.reshape(-1), *slice_)
        kept = None if support is None else Cells.of(support.rows, support.ids, *slice_)
        local, (of_top, *of_kept) = _scan(blocks, column, [tops] if kept is None else [tops, kept], entropy)
        del blocks
        local += of_top.new_zeros(top.numel()).index_copy_(0, tops.source, of_top).view(top.shape).unbind(1)
        if kept is not None:
            local += _over_cells(kept, of_kept[0], count)
        every = _everywhere(torch.stack(local), group)

        most, total = _joined(every[:, 0], every[:, 1])
        chosen, log_total = every[:, 2].sum(0), total.log()
        sampled = whole = chosen - most - log_total
        saved = [hidden, weight, most + log_total, column, tops.places, tops.source]
        other, entropies, first = whole.new_empty(0), whole.new_empty(0), 3
        if entropy:
            # Each rank's sum of exp(z - m) (z - m) uses its own m.
            shift, first = every[:, 0] - most, 4
            entropies = log_total - ((every[:, 3] + shift * every[:, 1]) * shift.exp()).sum(0) / total
        if support is not None and kept is not None:
            over = _joined(torch.where(support.here, every[:, -2], 0.0), every[:, -1])
            most, log_total = torch.where(support.here, over[0], most), torch.where(support.here, over[1].log(), log_total)
            sampled, other = chosen - most - log_total, whole
            share = (of_kept[0] - most[kept.rows] - log_total[kept.rows]).exp_()
            saved += [support.here, kept.places, share.neg_()]
        ctx.save_for_backward(*saved)
        ctx.scale, ctx.ends = scale, (tops.ends, () if kept is None else kept.ends)
        ctx.mark_non_differentiable(*([entropies] if support is not None else [entropies, other]))
        # A top id's logit is on one rank; the others have 0.
        return sampled, other, entropies, every[:, first : first + width].sum(0).t() - (most + log_total)[:, None]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, normaliser, column, places, source, *of_support = ctx.saved_tensors
        upstream, of_top = gradients[0] * ctx.scale, gradients[3] * ctx.scale
        total = upstream + of_top.sum(1)
        cells = [CellGradients(places, of_top.reshape(-1)[source], ctx.ends[0], torch.ones_like(total))]
        if of_support:
            here, places, shares = of_support
            cells.append(CellGradients(places, shares, ctx.ends[1], total))
            of_whole = gradients[1] * ctx.scale
            upstream, total = upstream + of_whole, torch.where(here, 0.0, total) + of_whole
        rows = head_gradient.HeadRows(hidden, normaliser, column, upstream, total, cells)
        return *head_gradient.gradients(rows, weight, ctx.scale, *ctx.needs_input_grad[:2]), *[None] * 6


def _scan(
    blocks: LogitBlocks, column: torch.Tensor, cells: Sequence[Cells], entropy: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Make one pass over this rank's logits z.

    Returns:
        Per row, float32[n]: the maximum m, the sum of exp(z - m), the target's z if this rank has it, else 0; with entropy, the sum of
        exp(z - m) (z - m). And z of each of the cells, float32[m].
    """
    count = len(column)
    most, total, weighted = (column.new_full((count,), value, dtype=torch.float32) for value in (-torch.inf, 0.0, 0.0))
    chosen = torch.zeros_like(total)
    values = [total.new_empty(len(one.rows)) for one in cells]
    spare = blocks.like(torch.float32) if entropy else None
    spans = [one.spans() for one in cells]
    for first, last, block in blocks.each():
        inside, place = column_in(column, first, last)
        chosen = torch.where(inside, block.gather(1, place).squeeze(1), chosen)
        for one, into, each in zip(cells, values, spans, strict=True):
            span = next(each)
            torch.take(block, one.places[span], out=into[span])
        higher = torch.maximum(most, block.amax(dim=1))
        shift = (most - higher).clamp_(min=LEAST)  # minus infinity in the first block
        block.sub_(higher[:, None]).clamp_(min=LEAST)
        exp = block.exp_() if spare is None else torch.exp(block, out=blocks.shaped(spare, first, last))
        here, fading, most = exp.sum(dim=1), shift.exp(), higher
        if spare is not None:
            weighted = (weighted + shift * total) * fading + exp.mul_(block).sum(dim=1)
        total = total * fading + here
    return [most, total, chosen, *([weighted] if entropy else [])], values


def _over_cells(cells: Cells, values: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Return per row the maximum m of its cells' values, and the sum of exp(value - m); minus infinity and 0 without cells."""
    most = values.new_full((rows,), -torch.inf).scatter_reduce_(0, cells.rows, values, "amax")
    return [most, values.new_zeros(rows).index_add_(0, cells.rows, (values - most[cells.rows]).exp_())]


def _joined(most: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine per-rank maxima and sums of exp, [ranks, n], into those over all ranks."""
    highest = most.amax(dim=0)
    return highest, (total * (most - highest).exp()).sum(dim=0)


def _everywhere(local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return [ranks, ...]: every rank's values [...]."""
    if group is None or dist.get_world_size(group) == 1 or not local.numel():
        return local[None]
    ranks = dist.get_world_size(group)
    every = local.new_empty(ranks * len(local), *local.shape[1:])
    dist.all_gather_into_tensor(every, local, group=group)
    return every.view(ranks, *local.shape)
