"""The loss of a reinforcement-learning step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import Positive, PositiveFloat, Section


class ObjectiveSection(Section):
    """The loss of a reinforcement-learning step."""

    advantage: Literal["grpo", "grpo_no_std"] = Field(
        "grpo", description="Group mean subtracted; grpo also divides by the group's deviation."
    )
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    proximal: Literal["recompute", "behaviour"] = Field(
        "recompute",
        description="Denominator of the clipped ratio: the trainer's own log-probabilities before the step, or the engine's.",
    )
    tis_cap: PositiveFloat | None = Field(2.0, description="Token-level truncated importance sampling min(ratio, cap); null: off.")
    updates_per_batch: Positive = Field(1, description="Optimizer steps a batch is cut into.")
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"

    @model_validator(mode="after")
    def _check(self) -> ObjectiveSection:
        if self.proximal == "behaviour" and self.tis_cap is not None:
            raise ValueError(
                f"objective.tis_cap: got {self.tis_cap}, expected null because objective.proximal is behaviour (the ratio to the engine "
                "would be applied twice)"
            )
        return self
