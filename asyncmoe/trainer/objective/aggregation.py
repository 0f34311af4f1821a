"""What a token counts for: planned for the whole step before any forward pass, and after some were rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncmoe.config.objective import Aggregation
from asyncmoe.errors import InvariantBroken
from asyncmoe.trainer.objective.rows import Rows


def token_weights(
    sampled: Sequence[int], aggregation: Aggregation, groups: Sequence[int] | None = None, max_new_tokens: int | None = None
) -> np.ndarray:
    """What one sampled token of each sequence counts for in the step's loss: float64[n].

    Over all tokens they sum to 1, except sequence_sum's. A loss is the weighted sum over rows, so neither it nor its gradient depends on
    how rows are dealt to micro-batches and ranks. With l the sampled tokens of a sequence, n the sequences that have any:
        token_mean     1 / sum(l)                                      DAPO, arXiv 2503.14476, eq. 8
        sequence_mean  1 / (n l)                                       GRPO, arXiv 2402.03300, eq. 3; GSPO
        sequence_sum   1 / (n max_new_tokens)                          Dr. GRPO, arXiv 2503.20783: a constant
        prompt_mean    1 / (prompts * sum(l) over the prompt's group)

    Args:
        sampled: sampled tokens of each sequence of the step, over all ranks.
        groups: n; equal for responses to one prompt. Needed by prompt_mean.
        max_new_tokens: needed by sequence_sum.

    Raises:
        InvariantBroken: what the aggregation needs is missing.
    """
    counts = np.asarray(sampled, np.float64)
    some = counts > 0
    if aggregation == "token_mean":
        return np.full(len(counts), 1.0 / max(counts.sum(), 1.0))
    if aggregation == "sequence_mean":
        return np.asarray(some / (max(some.sum(), 1) * np.maximum(counts, 1.0)))
    if aggregation == "sequence_sum":
        if max_new_tokens is None:
            raise InvariantBroken("token_weights: got no max_new_tokens, expected it because sequence_sum divides by it")
        return np.asarray(some / (max(some.sum(), 1) * float(max_new_tokens)))
    if groups is None or len(groups) != len(counts):
        raise InvariantBroken("token_weights: expected a group for each sequence because prompt_mean counts groups alike")
    _, member = np.unique(np.asarray(groups), return_inverse=True)
    total = np.bincount(member, counts)
    return np.asarray(some / (max((total > 0).sum(), 1) * np.maximum(total, 1.0)[member]))


def kept_weights(rows: Rows, kept: torch.Tensor, aggregation: Aggregation, denominator: str) -> torch.Tensor:
    """What each row counts for when only `kept` ones are trained on: float32[T], to be divided by their sum over the whole step.

    kept: rejected rows weigh nothing. In sequence_mean the others of a sequence share out what it was planned to count for, so that it is
    the mean over its kept tokens; a sequence without any leaves. In prompt_mean a prompt counts for less by the share of its tokens that
    were rejected: its sequences may be on several ranks, so the others cannot take their place.
    planned, or sequence_sum, whose denominator is a constant: as planned.

    Args:
        rows: held (`Rows.held`).
        kept: bool[T]; within `rows.mask`.
    """
    if denominator == "planned" or aggregation == "sequence_sum":
        return rows.weights
    weights = torch.where(kept, rows.weights, 0.0)
    if aggregation != "sequence_mean":
        return weights
    planned, left = rows.sum(rows.weights), rows.sum(weights)
    factor = torch.where(left > 0, planned / torch.where(left > 0, left, 1.0), 0.0)
    return weights * rows.spread(factor).to(weights.dtype)


def scale(sums: Mapping[str, Any]) -> float:
    """What the loss and the gradient of a step are multiplied by, so that rejected tokens leave the denominator; 0: nothing was kept, and
    there is no update to make.

    Args:
        sums: of all micro-batches and ranks: kept, planned_weight, kept_weight.
    """
    kept, planned, left = (float(sums[name]) for name in ("kept", "planned_weight", "kept_weight"))
    return planned / left if kept and left > 0 else 0.0
