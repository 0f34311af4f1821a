"""Rules about values that a healthy run does not have (`verify.anomalies`): which values break one, and what follows.

Decisions only, over values that are equal on every rank: every rank decides alike without communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from asyncmoe.config.anomalies import AnomaliesSection
from asyncmoe.telemetry.schema import Step

Verdict = Literal["train", "skip", "stop"]
NOT_FINITE = "not_finite"
SKIPPED = "anomaly_"
"""Prefix of the reason under which a skipped batch counts as dropped; the rule's name follows."""


@dataclass(frozen=True)
class Anomaly:
    """A broken rule.

    Attributes:
        rule: its key in `verify.anomalies`.
        value: the value that broke it; NaN if it is not finite.
        why: the value and its bounds, in words.
        action: "warn", "skip" or "stop".
    """

    rule: str
    value: float
    why: str
    action: str


@dataclass(frozen=True)
class History:
    """What the rules remember of earlier RL steps.

    Attributes:
        values: by name, finite values of the latest steps, oldest first: "kl_engine", "grad_norm", "reward", "reward_std".
        skips: batches skipped in a row until now.
    """

    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    skips: int = 0

    def then(self, values: Mapping[str, float], skipped: bool, window: int) -> History:
        """Return the history after one more batch."""
        kept = dict(self.values)
        for name, value in values.items():
            if math.isfinite(value):
                kept[name] = (*kept.get(name, ()), value)[-window:]
        return History(kept, self.skips + 1 if skipped else 0)

    def median(self, name: str, after: int) -> float | None:
        """Return the running median; None with fewer than `after` values."""
        values = self.values.get(name, ())
        return median(values) if len(values) >= after else None


def history_of(steps: Sequence[Step], window: int) -> History:
    """Return the history that the records of RL steps give, oldest first."""
    history = History()
    for step in steps[-window:]:
        measured = (
            ("kl_engine", step.train_infer_kl),
            ("grad_norm", step.grad_norm),
            ("reward", step.reward_mean),
            ("reward_std", step.reward_std),
        )
        history = history.then({name: value for name, value in measured if value is not None}, step.skipped_updates is not None, window)
    return history


def judge(rules: AnomaliesSection, values: Mapping[str, float], history: History) -> tuple[Anomaly, ...]:
    """Return the rules that values of a batch break.

    Args:
        values: by name, those of "kl_engine", "grad_norm", "age", "reward" and "loss" that are known by now.
    """
    found = [_not_finite(rules, name, values[name]) for name in ("loss", "kl_engine", "grad_norm") if name in values]
    for name in ("kl_engine", "grad_norm"):
        rule = rules.kl_engine if name == "kl_engine" else rules.grad_norm
        if name in values:
            found.append(_too_large(name, values[name], rule.above, rule.factor, history.median(name, rules.after), rule.action))
    if "age" in values:
        found.append(_too_large("age", values["age"], rules.age.above, None, None, rules.age.action))
    if "reward" in values:
        found.append(_fallen(rules, values["reward"], history))
    return tuple(one for one in found if one is not None)


def verdict(findings: Sequence[Anomaly], history: History, rules: AnomaliesSection) -> Verdict:
    """Return what becomes of a batch. One batch more than `skips` in a row stops the run: what does not pass is no accident."""
    actions = {one.action for one in findings}
    if "stop" in actions or ("skip" in actions and history.skips >= rules.skips):
        return "stop"
    return "skip" if "skip" in actions else "train"


def _not_finite(rules: AnomaliesSection, name: str, value: float) -> Anomaly | None:
    if math.isfinite(value):
        return None
    what = {"loss": "the loss is", "kl_engine": "log-probabilities are", "grad_norm": "the gradient norm is"}[name]
    return Anomaly(NOT_FINITE, math.nan, f"{what} not finite", rules.not_finite)


def _too_large(name: str, value: float, above: float | None, factor: float | None, usual: float | None, action: str) -> Anomaly | None:
    if action == "off" or not math.isfinite(value) or (above is None and factor is None):
        return None
    if factor is not None and usual is None:
        return None
    limits = [] if above is None else [(above, f"{name}.above {above:g}")]
    if factor is not None and usual is not None:
        limits.append((factor * usual, f"{name}.factor {factor:g} times the running median {usual:.3g}"))
    if any(value <= limit for limit, _ in limits):
        return None
    return Anomaly(name, value, f"{name} is {value:.4g}, above {' and '.join(text for _, text in limits)}", action)


def _fallen(rules: AnomaliesSection, reward: float, history: History) -> Anomaly | None:
    rule = rules.reward
    if rule.action == "off" or (rule.below is None and rule.spreads is None):
        return None
    limits = [] if rule.below is None else [(rule.below, f"reward.below {rule.below:g}")]
    if rule.spreads is not None:
        usual, spread = history.median("reward", rules.after), history.median("reward_std", rules.after)
        if usual is None or not spread:  # rewards that were all equal have no scale
            return None
        limits.append(
            (usual - rule.spreads * spread, f"the running median {usual:.3g} by reward.spreads {rule.spreads:g} times {spread:.3g}")
        )
    if any(reward >= limit for limit, _ in limits):
        return None
    return Anomaly("reward", reward, f"reward is {reward:.4g}, below {' and '.join(text for _, text in limits)}", rule.action)
