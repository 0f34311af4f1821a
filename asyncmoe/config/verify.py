"""Checks that engine and trainer compute the same log-probabilities, and that values look like those of a healthy run."""

from __future__ import annotations

from typing import Literal

from asyncmoe.config.fields import Positive, PositiveFloat, Section

Action = Literal["warn", "skip", "stop"]


class KlRule(Section):
    """Divergence of the trainer from the engines that sampled the batch, in nats a token (`train_infer_kl`)."""

    action: Action = "skip"
    """warn: log it and record it; skip: also leave the batch untrained; stop: end the run."""
    above: PositiveFloat | None = 1.0
    """Anomalous if above this; null: no such bound."""


class GradNormRule(Section):
    """Gradient norm before clipping."""

    action: Action = "warn"
    """warn: log it and record it; skip: also leave the batch untrained; stop: end the run."""
    above: PositiveFloat | None = None
    """Anomalous if above this; null: no such bound."""


class AnomaliesSection(Section):
    """Values that no healthy run has. All trainer ranks decide alike, before parameters change."""

    kl_engine: KlRule = KlRule()
    grad_norm: GradNormRule = GradNormRule()
    not_finite: Literal["skip", "stop"] = "stop"
    """Action if a loss, a gradient norm or a log-probability is not finite. skip: leave the batch untrained; stop: end the run."""
    skips: Positive = 3
    """Batches in a row that may be skipped; one more stops the run."""


class VerifySection(Section):
    """Checks of every update before parameters change, at no cost."""

    max_logprob_diff: PositiveFloat | None = None
    """Stop before training on a batch in which the difference of the engine's and the trainer's log-probability, in nats, is above this on
    a token whose whole prefix was computed with the trainer's version. With `run.mode: sync` this holds for all tokens. null: no limit."""
    anomalies: AnomaliesSection = AnomaliesSection()
