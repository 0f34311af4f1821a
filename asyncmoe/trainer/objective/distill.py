"""On-policy distillation: advantages from a teacher's log-probabilities of tokens that the policy sampled itself."""

from __future__ import annotations

import numpy as np


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
