"""How much more likely the trainer makes a token, or a sequence, than the proximal policy did."""

from __future__ import annotations

from typing import Literal

import torch

from asyncmoe.trainer.objective.rows import LOG_RATIO_LIMIT, Rows


def ratio(new: torch.Tensor, old: torch.Tensor, rows: Rows, level: Literal["token", "sequence"]) -> torch.Tensor:
    """float32[T] with gradient; held within e^-20 and e^20, past which the gradient is zero.

        token     r = pi / pi_old                                                        PPO, arXiv 1707.06347, eq. 6
        sequence  s = sg(geometric mean of the sequence's r) * pi / sg(pi)               GSPO-token, arXiv 2507.18071, eq. 14

    sg stops the gradient. The geometric mean is over the sequence's sampled tokens, all of them: what is rejected later still counts.

    Args:
        new: float32[T] with gradient, held.
        old: float32[T], held.
    """
    log_ratio = new - old
    if level == "sequence":
        # In float64: what single tokens differ by may cancel, and be thousands of times their mean.
        mean = rows.mean(new.detach().double() - old.double())
        log_ratio = rows.spread(mean).to(new.dtype) + (new - new.detach())
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
