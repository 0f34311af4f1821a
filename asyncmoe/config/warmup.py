"""The supervised warm-up."""

from __future__ import annotations

from pydantic import Field

from asyncmoe.config.fields import NonNegative, Positive, PositiveFloat, Section


class WarmupSection(Section):
    """Supervised steps on the task's own demonstrations, before reinforcement learning."""

    steps: NonNegative = Field(0, description="Supervised steps; 0: none. A random model needs some, a real checkpoint none.")
    batch: Positive = Field(64, description="Demonstrations per step.")
    lr: PositiveFloat = Field(1e-3, description="Learning rate of the warm-up, constant.")
    wrong_share: float = Field(
        0.0, ge=0, lt=1, description="arithmetic: share of demonstrations with a wrong answer, to leave something for RL to improve."
    )
