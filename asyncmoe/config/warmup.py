"""The supervised warm-up."""

from __future__ import annotations

from pydantic import Field

from asyncmoe.config.fields import NonNegative, Positive, PositiveFloat, Section


class WarmupSection(Section):
    """Supervised steps on the task's own demonstrations, before reinforcement learning."""

    steps: NonNegative = 0
    """Supervised steps; 0: none. A random model needs some, a real checkpoint none."""
    batch: Positive = 64
    """Demonstrations per step."""
    lr: PositiveFloat = 1e-3
    """Learning rate of the warm-up, constant."""
    wrong_share: float = Field(0.0, ge=0, lt=1)
    """arithmetic: share of demonstrations with a wrong answer, to leave something for RL to improve."""
