"""Advantages of single tokens, in addition to the outcome's: from rewards of steps, and from a teacher's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncmoe.trainer.objective.advantages import STD_EPSILON


def step_scales(
    counts: Sequence[int], means: Sequence[float], squares: Sequence[float], groups: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and sample deviation of all step rewards in each response's group: float64[n] each; both 0 if the group has no step, the
    deviation 0 if it has only one.

    Merges the statistics of each response (the pairwise update of Chan, Golub and LeVeque 1979, for any number of parts), so a rank needs
    no other rank's steps. Equal rewards, which arrive as float32, have exactly their value as mean and exactly 0 as deviation, because
    float64 holds the sums of so few float32 values exactly.

    Args:
        counts, means, squares: n; number of steps of each response, their mean reward, and the sum of squared distances from the mean.
        groups: n; equal for responses that are compared.
    """
    count, mean, square, group = np.asarray(counts, np.int64), *(np.asarray(x, np.float64) for x in (means, squares)), np.asarray(groups)
    _, member = np.unique(group, return_inverse=True)
    total = np.bincount(member, count)
    centre = np.bincount(member, count * mean) / np.maximum(total, 1)
    spread = np.bincount(member, square + count * (mean - centre[member]) ** 2)
    return centre[member], np.sqrt(spread / np.maximum(total - 1, 1))[member]


def process_advantages(rewards: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """Return the step rewards' contribution to the advantages of one response's tokens: float64[T].

        r~_j = (r_j - mean) / (deviation + 1e-6)        over all steps of all responses of the group (`step_scales`)
        A_t  = sum of r~_j over the steps j that end at token t or later

    (DeepSeekMath, arXiv 2402.03300, section 4.1.3, process supervision.)

    Args:
        rewards: float32[T]; the reward of each step at its last token, NaN elsewhere.
    """
    normalised = np.where(np.isnan(rewards), 0.0, (rewards.astype(np.float64) - mean) / (deviation + STD_EPSILON))
    return np.asarray(np.cumsum(normalised[::-1])[::-1])


def distill_advantages(teacher: np.ndarray, behaviour: np.ndarray, clip: float | None) -> np.ndarray:
    """Return a teacher's contribution to the advantage of each token: float64[T].

        A_t = clip(log pi_teacher - log pi_b, -clip, clip)

    The mean over sampled tokens estimates -KL(pi_b || pi_teacher), the reverse divergence that distillation minimises (MiniLLM, arXiv
    2306.08543; GKD, arXiv 2306.13649). A policy gradient with A_t descends that divergence token by token, ignoring a token's effect on
    later tokens (GKD's gradient; a discount of 0).

    pi_b is the sampling policy: after temperature and, if sampling masks are kept, over the allowed ids. pi_teacher is always over the
    whole vocabulary. With masks this is therefore the divergence of the truncated policy from the whole teacher, which exceeds 0 by -log
    of the teacher's probability mass on the allowed ids even if both agree on them.

    Args:
        teacher, behaviour: float32[T]; log-probabilities of the sampled tokens, both 0 at other tokens.
        clip: limit of |A_t|; None: unlimited.
    """
    gap: np.ndarray = teacher.astype(np.float64) - behaviour
    return gap if clip is None else np.clip(gap, -clip, clip)
