"""What a teacher thinks of tokens that the policy sampled itself (on-policy distillation)."""

from __future__ import annotations

import numpy as np


def distill_advantages(teacher: np.ndarray, behaviour: np.ndarray, clip: float | None) -> np.ndarray:
    """What a teacher adds to the advantage of each token: float64[T].

        A_t = clip(log pi_teacher - log pi_b, -clip, clip)

    Its mean over sampled tokens estimates -KL(pi_b || pi_teacher), the reverse divergence that distillation makes small (MiniLLM, arXiv
    2306.08543; GKD, arXiv 2306.13649): a policy gradient with it goes down that divergence, a token at a time, as if what comes after were
    not the token's doing (GKD's gradient; a discount of 0).

    pi_b is the policy as it sampled: after temperature and, where sampling masks are kept, over the ids that were allowed. pi_teacher is
    over the whole vocabulary always. So with masks this is the divergence of the truncated policy from the whole teacher, which is above
    0 by -log of the teacher's share of those ids even where both agree on them.

    Args:
        teacher, behaviour: float32[T]; log-probabilities of the sampled tokens, both 0 at others.
        clip: None: as it is.
    """
    gap: np.ndarray = teacher.astype(np.float64) - behaviour
    return gap if clip is None else np.clip(gap, -clip, clip)
