"""Estimates of a divergence from single samples."""

from __future__ import annotations

import torch

from asyncmoe.config.objective import Estimator
from asyncmoe.trainer.objective.rows import LOG_RATIO_LIMIT, exp


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """e^d - 1 - d >= 0 of d = log q(x) - log p(x), held within 20: with x ~ p its mean is KL(p || q) (Schulman, "Approximating KL
    divergence", 2020)."""
    held = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return held.exp() - 1.0 - held


def penalty(new: torch.Tensor, reference: torch.Tensor, log_weight: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Estimates of KL(pi || pi_ref), one a token: float32[T] with gradient.

        with d = log pi_ref - log pi, held within 20
        k1        -d             its gradient, that of log pi, is zero in expectation: the value is right, the penalty does not act
        k2        d^2 / 2        its gradient is the divergence's where tokens are the trainer's own
        k3        e^d - 1 - d
        unbiased  w (e^d - 1 - d), w = pi / pi_b with its gradient: that of the divergence, whoever sampled the token
    (Schulman 2020; DeepSeek-V3.2, arXiv 2512.02556, section 3.1, whose pi_old is the engine's.)

    Args:
        new: float32[T] with gradient, held; over the same ids as `reference`.
        reference: float32[T], held.
        log_weight: float32[T] with gradient: log w, of the policy that tokens are sampled from, over the recorded support.
    """
    # In float64: of a small d, k3 is the small difference of large numbers.
    d = (reference.double() - new.double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        value = -d
    elif estimator == "k2":
        value = d**2 / 2
    else:
        value = k3(d)
    value = value.to(new.dtype)
    return value * exp(log_weight) if estimator == "unbiased" else value
