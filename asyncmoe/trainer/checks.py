"""Checks of each optimizer update before any parameter changes (`verify`): which values break a rule, and the action taken.

Values are equal on every rank, so all ranks reach the same decision without communication.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncmoe.config.verify import VerifySection
from asyncmoe.errors import AnomalyFound, InvariantBroken

log = logging.getLogger(__name__)

NOT_FINITE = "not_finite"
SKIPPED = "anomaly_"
"""Prefix of the drop reason of a skipped batch; the rule's name follows."""
_WORDS = {"loss": "the loss", "kl_engine": "the log-probabilities' divergence", "grad_norm": "the gradient norm"}

Guard = Callable[[Mapping[str, float]], bool]
"""Returns whether an update may proceed. Called with "loss", "kl_engine" and perhaps "logprob_diff" after the backward pass, and with
"grad_norm" (before clipping) before parameters change."""


@dataclass(frozen=True)
class Anomaly:
    """A broken rule.

    Attributes:
        rule: its key in `verify` or `verify.anomalies`.
        value: the value that broke it; NaN if it is not finite.
        why: the value and its bound, as text.
        action: "warn", "skip" or "stop".
    """

    rule: str
    value: float
    why: str
    action: str


def judge(section: VerifySection, values: Mapping[str, float]) -> tuple[Anomaly, ...]:
    """Return the rules that an update's values break; values as for `Guard`."""
    rules = section.anomalies
    bounds = (
        ("kl_engine", "kl_engine", rules.kl_engine.above, rules.kl_engine.action),
        ("grad_norm", "grad_norm", rules.grad_norm.above, rules.grad_norm.action),
        ("logprob_diff", "max_logprob_diff", section.max_logprob_diff, "stop"),
    )
    found = [
        Anomaly(NOT_FINITE, math.nan, f"{words} is not finite", rules.not_finite)
        for name, words in _WORDS.items()
        if not math.isfinite(values.get(name, 0.0))
    ]
    for name, rule, above, action in bounds:
        value = values.get(name, 0.0)
        if above is not None and math.isfinite(value) and value > above:
            found.append(Anomaly(rule, value, f"{rule} is {value:.4g}, above {above:g}", action))
    return tuple(found)


def finite(values: Mapping[str, float]) -> bool:
    """Guard warm-up updates, which have no rules.

    Raises:
        InvariantBroken: a value is not finite.
    """
    for name, value in values.items():
        if name in _WORDS and not math.isfinite(value):
            raise InvariantBroken(f"{_WORDS[name]} is {value}; no parameter was changed")
    return True


@dataclass
class BatchGuard:
    """The guard of one RL batch's updates. Once it refuses an update, it refuses the rest of the batch.

    Attributes:
        step: step number, for the log and errors.
        skips: consecutive batches skipped so far.
        says: whether this rank writes to the log.
        found: the broken rules, each once.
        refused: whether it has refused an update.
    """

    section: VerifySection
    step: int
    skips: int = 0
    says: bool = True
    found: dict[str, Anomaly] = field(default_factory=dict)
    refused: bool = False

    def __call__(self, values: Mapping[str, float]) -> bool:
        """See `Guard`.

        Raises:
            AnomalyFound: a rule stops the run, or more than `verify.anomalies.skips` batches in a row would be skipped, so that the
                anomaly seems to persist. The same on every rank.
        """
        now = judge(self.section, values)
        for one in now:
            if self.says and one.rule not in self.found:
                log.warning("anomaly: step %d: %s (%s)", self.step, one.why, one.action)
            self.found.setdefault(one.rule, one)
        skips = any(one.action == "skip" for one in now)
        if any(one.action == "stop" for one in now) or (skips and self.skips >= self.section.anomalies.skips):
            after = f" after {self.skips} skipped batches" if all(one.action != "stop" for one in now) else ""
            why = "; ".join(one.why for one in now)
            raise AnomalyFound(f"step {self.step}: {why} (verify){after}; no parameter was changed")
        self.refused = self.refused or skips
        return not self.refused

    @property
    def skipped(self) -> str:
        """Why the batch is left untrained: the rules that refused it; "" if none did."""
        return ",".join(sorted(rule for rule, one in self.found.items() if one.action != "warn"))


@dataclass
class RecordedGuard:
    """Repeats the decisions of an earlier training on a batch.

    Attributes:
        refused: for each update, whether it was refused.
        update: number of the current update.
    """

    refused: Sequence[bool]
    update: int = -1

    def __call__(self, values: Mapping[str, float]) -> bool:
        """See `Guard`. The first call for an update has its loss."""
        self.update += "loss" in values
        return not self.refused[self.update]
