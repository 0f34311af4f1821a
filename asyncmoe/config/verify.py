"""Checks that engine and trainer compute the same log-probabilities, and that values look like those of a healthy run."""

from __future__ import annotations

from typing import Literal

from asyncmoe.config.fields import Positive, PositiveFloat, Section

Action = Literal["warn", "skip", "stop"]


class KlRule(Section):
    """Divergence of the trainer from the engines that sampled the batch, in nats a token (`train_infer_kl`)."""

    action: Action = "skip"
    """warn: log and record the anomaly; skip: also leave the batch untrained; stop: end the run."""
    above: PositiveFloat | None = 1.0
    """Values above this are anomalous; null: no bound."""


class GradNormRule(Section):
    """Gradient norm before clipping."""

    action: Action = "warn"
    """warn: log and record the anomaly; skip: also leave the batch untrained; stop: end the run."""
    above: PositiveFloat | None = None
    """Values above this are anomalous; null: no bound."""


class AnomaliesSection(Section):
    """Rules for values that no healthy run has. All trainer ranks reach the same decision."""

    kl_engine: KlRule = KlRule()
    grad_norm: GradNormRule = GradNormRule()
    not_finite: Literal["skip", "stop"] = "stop"
    """Action if a loss, a gradient norm or a log-probability is not finite. skip: leave the batch untrained; stop: end the run."""
    skips: Positive = 3
    """Batches in a row that may be skipped; one more stops the run."""


class VerifySection(Section):
    """Checks before every optimizer step, at no cost."""

    max_logprob_diff: PositiveFloat | None = None
    """Stop before training on a batch in which engine and trainer differ by more than this, in nats, in a token's log-probability. Only
    tokens whose whole prefix was computed with the trainer's version count; with `run.mode: sync` those are all tokens. null: no limit."""
    anomalies: AnomaliesSection = AnomaliesSection()
