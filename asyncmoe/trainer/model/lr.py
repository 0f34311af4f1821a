"""The learning-rate schedule."""

from __future__ import annotations

import math

from asyncmoe.config.trainer import OptimizerSection


def lr_at(step: int, section: OptimizerSection, total: int) -> float:
    """Return the learning rate of optimizer step `step` (the first is 0) of `total`.

    It rises linearly to `lr` over `warmup_steps`, then stays, or falls to `min_lr` at the last step, linearly or along a half cosine.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.decay == "constant":
        return section.lr
    passed = min(1.0, (step - section.warmup_steps) / max(1, total - 1 - section.warmup_steps))
    share = 1.0 - passed if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
    return section.min_lr + (section.lr - section.min_lr) * share
