"""Rules about values that a healthy run does not have, and what follows from them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncmoe.config.fields import FINITE, NUMBER, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Real, Section

Action = Literal["off", "warn", "skip", "stop"]
Factor = Annotated[float, Field(gt=1), FINITE, NUMBER]
_ACTION = "off; warn: log it and record it; skip: also leave the batch untrained; stop: end the run and keep the evidence."
_ABOVE = "Anomalous only if above this; null: no such bound."
_FACTOR = "Anomalous only if above this many times the running median; null: no such bound."


class KlRule(Section):
    """Divergence of the trainer from the engines that sampled the batch, in nats a token (`train_infer_kl`)."""

    action: Action = Field("skip", description=_ACTION)
    above: PositiveFloat | None = Field(1.0, description=_ABOVE)
    factor: Factor | None = Field(None, description=_FACTOR)


class GradNormRule(Section):
    """Gradient norm before clipping."""

    action: Action = Field("warn", description=_ACTION)
    above: PositiveFloat | None = Field(10.0, description=_ABOVE)
    factor: Factor | None = Field(100.0, description=_FACTOR)


class AgeRule(Section):
    """Age of the oldest token of the batch in versions; `queue.staleness` bounds it too."""

    action: Action = Field("off", description=_ACTION)
    above: NonNegative | None = Field(None, description=_ABOVE)


class RewardRule(Section):
    """A fall of the batch's mean reward."""

    action: Action = Field("warn", description=_ACTION)
    below: Real | None = Field(None, description="Anomalous only if below this; null: no such bound.")
    spreads: NonNegativeFloat | None = Field(
        1.0,
        description="Anomalous only if below the running median by this many times the rewards' standard deviation (the running median "
        "of `reward_std`); null: no such bound.",
    )


class AnomaliesSection(Section):
    """Values that a healthy run does not have. A rule with several bounds needs all of them exceeded, and one without any never acts.
    All trainer ranks decide alike, before parameters change."""

    kl_engine: KlRule = KlRule()
    grad_norm: GradNormRule = GradNormRule()
    age: AgeRule = AgeRule()
    reward: RewardRule = RewardRule()
    not_finite: Literal["skip", "stop"] = Field(
        "stop", description="Action on a loss, a gradient norm or log-probabilities that are not finite: skip or stop, as above."
    )
    window: Positive = Field(32, description="RL steps of the running medians; after a resume they begin with the records of the run.")
    after: Positive = Field(8, description="RL steps that a running median needs before bounds relative to it act.")
    skips: Positive = Field(3, description="Batches in a row that may be skipped; one more stops the run.")
