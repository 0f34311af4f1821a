"""Log-probabilities of given tokens from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_ROWS = 1024
"""Rows taken to float32 at a time: bounds the extra memory of a large vocabulary to 1024 * V / tp floats."""


def target_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, group: dist.ProcessGroup | None, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(logits / temperature)[target], in float32, differentiable; and the entropy of each row, which is not.

    Args:
        logits: [T, V / tp]; this rank's slice of the vocabulary, rank r of `group` holding [r * V/tp, (r + 1) * V/tp). Not modified.
        targets: int64[T]; tokens of the whole vocabulary, the same on every rank of `group`.
        temperature: the one the tokens were sampled at.
        group: the tensor-parallel group; None: the vocabulary is whole.
        entropy: compute it, in nats; else None is returned in its place.

    Returns:
        float32[T] and float32[T] or None, the same on every rank of `group`.
    """
    logprobs, entropies = _TargetLogProbs.apply(logits, targets, 1.0 / temperature, group, entropy)  # type: ignore[no-untyped-call]
    return logprobs, entropies if entropy else None


class _TargetLogProbs(torch.autograd.Function):
    """Keeps the logits, which the graph holds anyway, and one log-normaliser a row; the softmax is made again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, scale: float, group: dist.ProcessGroup | None, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = logits.shape[1]
        rank = dist.get_rank(group) if group is not None else 0
        local = targets - rank * size
        here = (local >= 0) & (local < size)
        column = local.clamp(0, size - 1)

        maximum = logits.amax(dim=1).float() * scale
        _reduce(maximum, dist.ReduceOp.MAX, group)
        # One reduction for all three: sum of exp, chosen logit, and sum of exp * logit (for the entropy).
        sums = torch.zeros(3 if entropy else 2, logits.shape[0], dtype=torch.float32, device=logits.device)
        for first in range(0, logits.shape[0], _ROWS):
            rows = slice(first, first + _ROWS)
            shifted = (logits[rows].float() * scale).sub_(maximum[rows, None])
            sums[1, rows] = shifted.gather(1, column[rows, None]).squeeze(1) * here[rows]
            exp = shifted.exp()
            sums[0, rows] = exp.sum(dim=1)
            if entropy:
                sums[2, rows] = exp.mul_(shifted).sum(dim=1)
        _reduce(sums, dist.ReduceOp.SUM, group)

        log_sum = sums[0].log()
        entropies = log_sum - sums[2] / sums[0] if entropy else log_sum.new_empty(0)
        ctx.save_for_backward(logits, maximum + log_sum, column, here)
        ctx.scale = scale
        ctx.mark_non_differentiable(entropies)
        return sums[1] - log_sum, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, normaliser, column, here = ctx.saved_tensors
        upstream = gradients[0] * ctx.scale
        result = torch.empty_like(logits)
        for first in range(0, logits.shape[0], _ROWS):
            rows = slice(first, first + _ROWS)
            softmax = (logits[rows].float() * ctx.scale).sub_(normaliser[rows, None]).exp_()
            gradient = softmax.mul_(-upstream[rows, None])
            gradient.scatter_add_(1, column[rows, None], (upstream[rows] * here[rows])[:, None])
            result[rows] = gradient
        return result, None, None, None, None


def _reduce(tensor: torch.Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=operation, group=group)
