"""Rewards of single steps: which steps were better than others, besides whose outcome was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncmoe.errors import InvariantBroken
from asyncmoe.trainer.objective.advantages import STD_EPSILON


def step_scales(
    counts: Sequence[int], means: Sequence[float], squares: Sequence[float], groups: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample deviation of all step rewards of each response's group: float64[n] twice; 0 where the group has no step, deviation 0
    where it has one.

    From what each response says about its own (the pairwise update of Chan, Golub and LeVeque 1979, for any number), so that a rank needs
    no other rank's steps. Equal rewards, float32 as they come, have exactly their value as the mean, and exactly the deviation 0: float64
    holds sums of so many of them exactly.

    Args:
        counts, means, squares: n; steps of each response, their mean reward, and the sum of their squared distances from it.
        groups: n; equal for responses that are compared.

    Raises:
        InvariantBroken: lengths differ.
    """
    count, mean, square, group = np.asarray(counts, np.int64), *(np.asarray(x, np.float64) for x in (means, squares)), np.asarray(groups)
    if not len(count) == len(mean) == len(square) == len(group):
        raise InvariantBroken(f"step rewards: got {len(count)}, {len(mean)}, {len(square)} figures of {len(group)} responses")
    if not len(count):
        return np.zeros(0), np.zeros(0)
    _, member = np.unique(group, return_inverse=True)
    total = np.bincount(member, count)
    centre = np.bincount(member, count * mean) / np.maximum(total, 1)
    spread = np.bincount(member, square + count * (mean - centre[member]) ** 2)
    return centre[member], np.sqrt(spread / np.maximum(total - 1, 1))[member]


def process_advantages(rewards: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """What the steps of one response add to the advantages of its tokens: float64[T].

        r~_j = (r_j - mean) / (deviation + 1e-6)        over all steps of all responses of the group (`step_scales`)
        A_t  = sum of r~_j over the steps j that end at token t or after it

    (DeepSeekMath, arXiv 2402.03300, section 4.1.3, process supervision.)

    Args:
        rewards: float32[T]; of a step at its last token, NaN elsewhere.
    """
    normalised = np.where(np.isnan(rewards), 0.0, (rewards.astype(np.float64) - mean) / (deviation + STD_EPSILON))
    return np.asarray(np.cumsum(normalised[::-1])[::-1])
