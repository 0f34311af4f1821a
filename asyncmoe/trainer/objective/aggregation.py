"""Loss weights of tokens: planned for the whole step before any forward pass, and adjusted for rejected tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncmoe.config.objective import Aggregation
from asyncmoe.trainer.objective.rows import Rows


def token_weights(sampled: Sequence[int], aggregation: Aggregation, groups: Sequence[int] = (), max_new_tokens: int = 0) -> np.ndarray:
    """Return the weight of one sampled token of each sequence in the step's loss: float64[n].

    The weights sum to 1 over all tokens, except for sequence_sum. A loss is the weighted sum over rows, so neither the loss nor its
    gradient depends on how rows are distributed over micro-batches and ranks. With l the number of sampled tokens in a sequence and n the
    number of sequences that have any:
        token_mean     1 / sum(l)                                      DAPO, arXiv 2503.14476, eq. 8
        sequence_mean  1 / (n l)                                       GRPO, arXiv 2402.03300, eq. 3; GSPO
        sequence_sum   1 / (n max_new_tokens)                          Dr. GRPO, arXiv 2503.20783: a constant
        prompt_mean    1 / (prompts * sum(l) over the prompt's group)

    Args:
        sampled: number of sampled tokens in each sequence of the step, over all ranks.
        groups: n; equal for responses to one prompt. Required by prompt_mean.
        max_new_tokens: required by sequence_sum.
    """
    counts = np.asarray(sampled, np.float64)
    some = counts > 0
    if aggregation == "token_mean":
        return np.full(len(counts), 1.0 / max(counts.sum(), 1.0))
    if aggregation == "sequence_mean":
        return np.asarray(some / (max(some.sum(), 1) * np.maximum(counts, 1.0)))
    if aggregation == "sequence_sum":
        return np.asarray(some / (max(some.sum(), 1) * float(max_new_tokens)))
    _, member = np.unique(np.asarray(groups), return_inverse=True)
    total = np.bincount(member, counts)
    return np.asarray(some / (max((total > 0).sum(), 1) * np.maximum(total, 1.0)[member]))


def kept_weights(rows: Rows, kept: torch.Tensor, aggregation: Aggregation, denominator: str) -> torch.Tensor:
    """Return the row weights if only `kept` rows are trained on: float32[T], to be divided by their sum over the whole step.

    Denominator "kept": rejected rows weigh nothing. With sequence_mean the kept tokens of a sequence share its planned weight, so the
    sequence counts as the mean over its kept tokens; a sequence without kept tokens drops out. With prompt_mean a prompt loses the weight
    of its rejected tokens: its sequences may be on several ranks, so the kept tokens cannot take over that weight.
    Denominator "planned", or sequence_sum, whose denominator is a constant: the planned weights.

    Args:
        rows: from `Rows.clamped`.
        kept: bool[T]; subset of `rows.mask`.
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
    """Return the factor for the loss and gradient of a step that removes rejected tokens from the denominator; 0 if no token was kept, so
    that no update is to be made.

    Args:
        sums: kept, planned_weight and kept_weight over all micro-batches and ranks.
    """
    kept, planned, left = (float(sums[name]) for name in ("kept", "planned_weight", "kept_weight"))
    return planned / left if kept and left > 0 else 0.0
