"""Log-probabilities of given tokens from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from asyncmoe.trainer.data.replay_data import Support

_ROWS = 1024
"""Rows converted to float32 at a time; limits the extra memory of a large vocabulary to 1024 * V / tp floats."""


def target_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    support: Support | None = None,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute each target's log-probability as it was sampled, in float32, differentiable; and each row's entropy, not differentiable.

    With z = logits / temperature, and S the ids the target was sampled from, or all ids if a row has no support:

        z[target] - logsumexp of z over S

    ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556 section 3.1). The entropy is that of the softmax over all ids.

    Args:
        logits: [T, V / tp]; this rank's slice of the vocabulary, rank r of `group` holding [r * V/tp, (r + 1) * V/tp). Not modified.
        targets: int64[T]; tokens of the whole vocabulary, the same on every rank of `group`.
        temperature: the sampling temperature of the tokens.
        group: the tensor-parallel group; None: the vocabulary is whole.
        support: support of the T rows.
        entropy: compute the entropy, in nats; if false, None is returned in its place.

    Returns:
        float32[T] and float32[T] or None, the same on every rank of `group`.
    """
    arguments = (logits, targets, 1.0 / temperature, group, support, entropy)
    logprobs, entropies = _TargetLogProbs.apply(*arguments)  # type: ignore[no-untyped-call]
    return logprobs, entropies if entropy else None


class _TargetLogProbs(torch.autograd.Function):
    """Keeps the logits, which the graph holds anyway, and one log-normaliser per row; the backward pass recomputes the softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        group: dist.ProcessGroup | None,
        support: Support | None,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = logits.shape[1]
        rank = dist.get_rank(group) if group is not None else 0
        local = targets - rank * size
        here = (local >= 0) & (local < size)
        column = local.clamp(0, size - 1)
        sparse = None if support is None else _local(support, rank * size, size)

        maximum = logits.amax(dim=1).float() * scale
        if sparse is not None:
            # Supports need their own maximum: the most probable id now may be outside the support and dwarf all ids in it.
            most = torch.full_like(maximum, -torch.inf).scatter_reduce_(0, sparse.rows, _values(logits, sparse, scale), "amax")
            maximum = torch.stack([maximum, most])
        _reduce(maximum, dist.ReduceOp.MAX, group)
        whole = maximum if sparse is None else maximum[0]
        shift = whole if sparse is None else torch.where(sparse.here, maximum[1], whole)

        # One reduction for all: sum of exp over the support, chosen logit; for the entropy, sums of exp and of exp * logit over all ids.
        sums = torch.zeros(4 if entropy else 2, logits.shape[0], dtype=torch.float32, device=logits.device)
        for first in range(0, logits.shape[0], _ROWS):
            rows = slice(first, first + _ROWS)
            shifted = logits[rows].float() * scale
            sums[1, rows] = (shifted.gather(1, column[rows, None]).squeeze(1) - shift[rows]) * here[rows]
            exp = shifted.sub_(whole[rows, None]).exp()
            sums[0, rows] = exp.sum(dim=1)
            if entropy:
                sums[2, rows] = sums[0, rows]
                sums[3, rows] = exp.mul_(shifted).sum(dim=1)
        if sparse is not None:
            inside = torch.zeros_like(shift).index_add_(0, sparse.rows, (_values(logits, sparse, scale) - shift[sparse.rows]).exp())
            sums[0] = torch.where(sparse.here, inside, sums[0])
        _reduce(sums, dist.ReduceOp.SUM, group)

        log_sum = sums[0].log()
        entropies = sums[2].log() - sums[3] / sums[2] if entropy else log_sum.new_empty(0)
        ctx.save_for_backward(logits, shift + log_sum, column, here)
        ctx.scale, ctx.sparse = scale, sparse
        ctx.mark_non_differentiable(entropies)
        return sums[1] - log_sum, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, normaliser, column, here = ctx.saved_tensors
        sparse: Support | None = ctx.sparse
        upstream = gradients[0] * ctx.scale
        dense = upstream if sparse is None else upstream.masked_fill(sparse.here, 0.0)
        result = torch.empty_like(logits)
        for first in range(0, logits.shape[0], _ROWS):
            rows = slice(first, first + _ROWS)
            # If a row has a support, its normaliser does not cover all ids: exp could overflow, and 0 * inf is not 0.
            softmax = (logits[rows].float() * ctx.scale).sub_(normaliser[rows, None]).clamp_(max=0.0).exp_()
            gradient = softmax.mul_(-dense[rows, None])
            gradient.scatter_add_(1, column[rows, None], (dense[rows] * here[rows])[:, None])
            result[rows] = gradient
        if sparse is not None:
            share = (_values(logits, sparse, ctx.scale) - normaliser[sparse.rows]).exp()
            chosen = (column[sparse.rows] == sparse.ids) & here[sparse.rows]
            result[sparse.rows, sparse.ids] = (upstream[sparse.rows] * (chosen.float() - share)).to(result.dtype)
        return result, None, None, None, None, None


def _local(support: Support, first: int, size: int) -> Support:
    """Return the ids in this rank's slice of the vocabulary, counted from the slice's first id."""
    mine = (support.ids >= first) & (support.ids < first + size)
    return Support(support.here, support.rows[mine], support.ids[mine] - first)


def _values(logits: torch.Tensor, support: Support, scale: float) -> torch.Tensor:
    return logits[support.rows, support.ids].float() * scale


def _reduce(tensor: torch.Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=operation, group=group)
