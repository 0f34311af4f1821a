"""Rejections, scoring and evaluations in words, for the live view and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncmoe.telemetry.format import number, percent
from asyncmoe.telemetry.gauges import ratio
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout, Scoring

_REASONS = 3


@dataclass(frozen=True)
class Rejected:
    """Rejected trajectories by reason, and the number of started trajectories."""

    by_reason: Mapping[str, int]
    started: int

    @property
    def share(self) -> float | None:
        return ratio(sum(self.by_reason.values()), self.started)

    def __str__(self) -> str:
        """Describe them, for example: "64 % of 132 started (scorer_error 80, scorer_timeout 4)"."""
        reasons = f" ({counts(self.by_reason)})" if self.by_reason else ""
        return f"{percent(self.share)} of {number(self.started)} started{reasons}"


def rejected(records: Sequence[Rollout]) -> Rejected:
    """Return the rejections of a run, which the newest record counts."""
    return Rejected(dict(Counter(records[-1].rejected).most_common()), records[-1].started) if records else Rejected({}, 0)


def describe(stage: Scoring) -> str:
    """Describe a stage in one line, without what is 0: "1,204 scored in 0.12 s each   3 failed (scorer_error 3)   2 retried"."""
    ended = stage.scored + sum(stage.failed.values())
    parts = [f"{stage.scored:,} scored" + (f" in {number(stage.seconds / ended, 's', 2)} each" if ended else "")]
    parts += [f"{sum(stage.failed.values()):,} failed ({counts(stage.failed)})"] if stage.failed else []
    parts += [f"{stage.retried:,} retried"] if stage.retried else []
    parts += [f"{stage.in_flight} in flight"] if stage.in_flight else []
    parts += [f"{stage.waiting} waiting"] if stage.waiting else []
    return "   ".join(parts)


def evaluated(record: Evaluation) -> str:
    """Describe an evaluation: "version 20   math   reward 0.43 ± 0.05   pass@4 0.7   25 % failed"; omits a name, pass@k and failures that
    are not there."""
    error = "" if record.reward_stderr is None else f" ± {number(record.reward_stderr)}"
    failed = [f"{percent(record.failed_share)} failed"] if record.failed_share else []
    passed = [f"pass@{record.samples} {number(share)}" for k, share in record.pass_at.items() if k == str(record.samples) != "1"]
    named = [record.name] if record.name else []
    return "   ".join([f"version {record.version}", *named, f"reward {number(record.reward_mean)}{error}", *passed, *failed])


def counts(by_reason: Mapping[str, int]) -> str:
    """Name the most frequent reasons with their counts: "scorer_error 80, scorer_timeout 4"."""
    most = Counter(by_reason).most_common()
    shown = [f"{reason} {count:,}" for reason, count in most[:_REASONS]]
    return ", ".join([*shown, *(["..."] if len(most) > _REASONS else [])])
