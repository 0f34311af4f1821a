"""The importance ratio of the trainer's policy to the proximal policy, by token or by sequence."""

from __future__ import annotations

from typing import Literal

import torch

from asyncmoe.trainer.objective.rows import LOG_RATIO_LIMIT, Rows


def ratio(new: torch.Tensor, old: torch.Tensor, rows: Rows, level: Literal["token", "sequence"]) -> torch.Tensor:
    """Compute the ratio of each row: float32[T] with gradient; clamped to [e^-20, e^20], beyond which the gradient is zero.

        token     r = pi / pi_old                                                        PPO, arXiv 1707.06347, eq. 6
        sequence  s = sg(geometric mean of the sequence's r) * pi / sg(pi)               GSPO-token, arXiv 2507.18071, eq. 14

    sg stops the gradient. The geometric mean is over all sampled tokens of the sequence, including tokens rejected later.

    Args:
        new: float32[T] with gradient, from `clamped`.
        old: float32[T], from `clamped`.
    """
    log_ratio = new - old
    if level == "sequence":
        # In float64: differences of single tokens may cancel and be thousands of times their mean.
        mean = rows.mean(new.detach().double() - old.double())
        log_ratio = rows.spread(mean).to(new.dtype) + (new - new.detach())
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
