"""Single-sample estimates of the KL divergence."""

from __future__ import annotations

import torch

from asyncmoe.config.objective import Estimator
from asyncmoe.trainer.objective.rows import LOG_RATIO_LIMIT, exp


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return e^d - 1 - d >= 0 with d = log q(x) - log p(x) clamped to [-20, 20]; its mean over x ~ p is KL(p || q) (Schulman,
    "Approximating KL divergence", 2020)."""
    held = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return held.exp() - 1.0 - held


def penalty(new: torch.Tensor, reference: torch.Tensor, log_weight: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Estimate KL(pi || pi_ref) for each token: float32[T] with gradient.

        with d = log pi_ref - log pi, clamped to [-20, 20]
        k1        -d             its gradient, that of log pi, has expectation zero: the value is right, but the penalty has no effect
        k2        d^2 / 2        its gradient is the divergence's if the trainer's policy sampled the tokens
        k3        e^d - 1 - d
        unbiased  w (e^d - 1 - d), w = pi / pi_b with gradient: its gradient is the divergence's, whichever policy sampled the token
    (Schulman 2020; DeepSeek-V3.2, arXiv 2512.02556, section 3.1, whose pi_old is the engine's policy.)

    Args:
        new: float32[T] with gradient, from `clamped`; over the same ids as `reference`.
        reference: float32[T], from `clamped`.
        log_weight: float32[T] with gradient: log w, relative to the behaviour policy, over the recorded support.
    """
    # In float64: for small d, k3 is a small difference of large numbers.
    d = (reference.double() - new.double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        value = -d
    elif estimator == "k2":
        value = d**2 / 2
    else:
        value = k3(d)
    value = value.to(new.dtype)
    return value * exp(log_weight) if estimator == "unbiased" else value
