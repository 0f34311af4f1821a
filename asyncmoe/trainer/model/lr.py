"""The learning-rate schedule."""

from __future__ import annotations

import math

from asyncmoe.config.trainer import OptimizerSection


def lr_at(step: int, section: OptimizerSection, total: int) -> float:
    """Return the learning rate of optimizer step `step` (the first is 0) of `total`.

    It rises linearly to `lr` over `warmup_steps`, then stays constant, or falls linearly or along a half cosine to `min_lr`, reached only
    after the last step: a last step at `min_lr` 0 would train nothing. (Megatron's `OptimizerParamScheduler` does the same.)
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.decay == "constant":
        return section.lr
    passed = min(1.0, (step - section.warmup_steps) / max(1, total - section.warmup_steps))
    share = 1.0 - passed if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
    return section.min_lr + (section.lr - section.min_lr) * share
