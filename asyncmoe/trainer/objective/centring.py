"""Score centring (Marek and Ryabinin, "Score Centering Stabilizes Off-policy Reinforcement Learning", arXiv 2609.20807, eq. 14)."""

from __future__ import annotations

import torch

from asyncmoe.config.objective import CorrectionSection
from asyncmoe.trainer.objective.correction import token_weight
from asyncmoe.trainer.objective.rows import clamped

SUMS = ("score_centering/tail", "score_centering/ratio")
"""Names of the sums over sampled tokens, whose means are metrics: of 1 - sum of q, and of rho (`centred`)."""
LEAST_TAIL = 1e-6
"""Lower bound of a tail's probability: smaller ones are rounding errors."""


def centred(new: torch.Tensor, sampler: torch.Tensor, rule: CorrectionSection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, for each row, a function of log p whose gradient is the score that the sampler expects.

    With p the trainer's policy, q the sampler, H the sampler's most probable ids, w the importance weight of a token as a function of p / q
    (`token_weight`), and sg stopping the gradient:

        C = sum over v in H of  sg(q(v) w(p(v) / q(v)) - rho w(1 / rho) p(v)) log p(v),   rho = (1 - sum q) / (1 - sum p)

    The gradient of C is that of the sum over all ids of sg(q w) log p, if q = rho p outside H, because the sum of p's gradients is 0.

    Args:
        new: float32[T, K] with gradient: log p of the ids in H.
        sampler: float32[T, K]: log q of these ids; -inf where there is none.

    Returns:
        C, float32[T], with gradient; the tail 1 - sum q and rho, float32[T].
    """
    here = sampler > -torch.inf
    new = clamped(new, here)
    with torch.no_grad():
        p, q = torch.where(here, new.exp(), 0.0), sampler.exp()
        of_p, of_q = ((1.0 - one.sum(1)).clamp(min=LEAST_TAIL) for one in (p, q))
        rho = of_q / of_p
        kept = q * token_weight(torch.where(here, new - sampler, 0.0), rule)
        tail = rho * token_weight(-rho.log(), rule)
    return ((kept - tail[:, None] * p) * new).sum(1), of_q, rho
