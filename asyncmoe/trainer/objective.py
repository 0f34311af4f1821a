"""Advantages and losses: pure functions over flat arrays.

A loss here is a weighted sum over rows. The weights (`token_weights`) are a property of the whole step, known before any forward
pass, so the loss and its gradient do not depend on how rows are dealt to micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

Sums = dict[str, torch.Tensor]
"""Named sums over rows, scalars; added over micro-batches and ranks. Names that start with "max_" are maxima, -1 where there was none."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within it before `exp`: e^20 = 4.9e8 is finite in float32 after products with advantages and sums over rows, and
any clip or cap acts long before. Past it a row's gradient is zero."""

STD_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], groups: Sequence[int], mode: Literal["grpo", "grpo_no_std"]) -> np.ndarray:
    """Rewards compared within each group: float32[n].

    grpo: (r - mean) / (std + 1e-6), std the sample deviation (n - 1) (DeepSeekMath, arXiv 2402.03300, eq. 4.1.2 outcome
    supervision); grpo_no_std: r - mean (Dr. GRPO, arXiv 2503.20783). A group of equal rewards gets 0.
    """
    reward, group = np.asarray(rewards, np.float64), np.asarray(groups)
    _, member, count = np.unique(group, return_inverse=True, return_counts=True)
    centred = reward - (np.bincount(member, reward) / count)[member]
    if mode == "grpo":
        variance = np.bincount(member, centred**2) / np.maximum(count - 1, 1)
        centred = centred / (np.sqrt(variance)[member] + STD_EPSILON)
    return centred.astype(np.float32)


def token_weights(sampled: Sequence[int], aggregation: Literal["token_mean", "sequence_mean"]) -> np.ndarray:
    """What one sampled token of each trajectory counts for in the step's loss: float64[n]; over all tokens they sum to 1.

    Args:
        sampled: sampled tokens of each trajectory of the step, over all ranks, > 0.
        aggregation: token_mean: every token of the step counts alike; sequence_mean: every trajectory does.
    """
    counts = np.asarray(sampled, np.float64)
    if aggregation == "token_mean":
        return np.full(len(counts), 1.0 / max(counts.sum(), 1.0))
    return 1.0 / (len(counts) * counts)


@dataclass(frozen=True)
class Rows:
    """What a policy loss looks at, flat over T; as the fields of `batch.MicroBatch` of the same names."""

    mask: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor
    behaviour: torch.Tensor
    proximal: torch.Tensor
    """float32[T]: denominator of the clipped ratio. Carries no gradient."""


def policy_loss(
    logprobs: torch.Tensor, rows: Rows, *, clip_low: float, clip_high: float, tis_cap: float | None
) -> tuple[torch.Tensor, Sums]:
    """PPO's clipped surrogate, weighted by truncated importance sampling where `tis_cap` is given.

        ratio = pi / pi_proximal;  tis = min(pi_proximal / pi_behaviour, cap), held constant
        loss = sum over sampled rows of  weight * tis * max(-A ratio, -A clip(ratio, 1 - low, 1 + high))

    (PPO, arXiv 1707.06347 eq. 7; decoupled proximal policy, arXiv 2110.00641; token-level truncated weight as in "Your efficient RL
    framework secretly brings you off-policy RL training", Yao et al. 2025.)

    Args:
        logprobs: float32[T] with gradient.

    Returns:
        The loss, a scalar, and sums over sampled rows: tokens, clipped (rows whose gradient the clip cuts), tis_capped, ratio
        (pi / pi_behaviour), kl (of behaviour to pi, Schulman's k3: e^d - 1 - d, d = log pi - log behaviour).
    """
    mask = rows.mask
    ratio = _ratio(logprobs, rows.proximal, mask)
    unclipped = -rows.advantages * ratio
    clipped = -rows.advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.maximum(unclipped, clipped)
    with torch.no_grad():
        correction = _ratio(rows.proximal, rows.behaviour, mask)
        capped = torch.zeros_like(mask)
        if tis_cap is None:
            correction = torch.ones_like(correction)
        else:
            capped = (correction > tis_cap) & mask
            correction = correction.clamp(max=tis_cap)
    loss = (torch.where(mask, surrogate, 0.0) * correction * rows.weights).sum()
    with torch.no_grad():
        drift = torch.where(mask, logprobs - rows.behaviour, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        sums = {
            "tokens": mask.sum(),
            "clipped": (clipped > unclipped).sum(),
            "tis_capped": capped.sum(),
            "ratio": (drift.exp() * mask).sum(),
            "kl": (drift.exp() - 1.0 - drift).sum(),
        }
    return loss, sums


def supervised_loss(logprobs: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Weighted negative log-likelihood of the sampled (demonstrated) tokens."""
    loss = -(torch.where(mask, logprobs, 0.0) * weights).sum()
    return loss, {"tokens": mask.sum()}


def agreement(
    logprobs: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, versions: torch.Tensor, pure: torch.Tensor, version: int
) -> Sums:
    """How far engine and trainer are apart in log-probability.

    Returns:
        max_logprob_diff_same_version: over rows of pure trajectories of the trainer's own `version`, where they should agree; -1 where
        there is none. logprob_diff: sum of |difference| over sampled rows.
    """
    with torch.no_grad():
        difference = torch.where(mask, (logprobs - behaviour).abs(), 0.0)
        same = pure & mask & (versions == version)
        return {
            "max_logprob_diff_same_version": torch.where(same, difference, -1.0).max(),
            "logprob_diff": difference.sum(),
        }


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp of the log-ratio; 1 outside `mask`."""
    return torch.where(mask, numerator - denominator, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
