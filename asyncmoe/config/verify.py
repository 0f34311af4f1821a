"""Checks that engine and trainer compute the same log-probabilities, and that values are those of a healthy run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncmoe.config.fields import Positive, PositiveFloat, Section

Action = Literal["warn", "skip", "stop"]
_ACTION = "warn: log it and record it; skip: also leave the batch untrained; stop: end the run."
_ABOVE = "Anomalous if above this; null: no such bound."


class KlRule(Section):
    """Divergence of the trainer from the engines that sampled the batch, in nats a token (`train_infer_kl`)."""

    action: Action = Field("skip", description=_ACTION)
    above: PositiveFloat | None = Field(1.0, description=_ABOVE)


class GradNormRule(Section):
    """Gradient norm before clipping."""

    action: Action = Field("warn", description=_ACTION)
    above: PositiveFloat | None = Field(None, description=_ABOVE)


class AnomaliesSection(Section):
    """Values that a healthy run does not have. All trainer ranks decide alike, before parameters change."""

    kl_engine: KlRule = KlRule()
    grad_norm: GradNormRule = GradNormRule()
    not_finite: Literal["skip", "stop"] = Field(
        "stop", description="Action on a loss, a gradient norm or log-probabilities that are not finite: skip or stop, as above."
    )
    skips: Positive = Field(3, description="Batches in a row that may be skipped; one more stops the run.")


class VerifySection(Section):
    """What every update is checked for before parameters change, at no cost."""

    max_logprob_diff: PositiveFloat | None = Field(
        None,
        description="Stop before training on a batch with a larger |engine - trainer| log-probability on tokens whose whole prefix the "
        "trainer's version computed, in nats; null: no limit. With `run.mode: sync` these are all tokens.",
    )
    anomalies: AnomaliesSection = AnomaliesSection()
