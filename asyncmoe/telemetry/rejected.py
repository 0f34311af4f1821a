"""Rejections and scoring in words, for the live view and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from asyncmoe.telemetry.format import number, percent
from asyncmoe.telemetry.gauges import ratio
from asyncmoe.telemetry.rollout_schema import Rollout, Scoring

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


def ends(records: Sequence[Rollout]) -> list[Rollout]:
    """Return the last record of each start of the controller, whose counters begin at 0 again."""
    return [before for before, after in pairwise(records) if after.started < before.started] + [*records[-1:]]


def rejected(records: Sequence[Rollout]) -> Rejected:
    """Sum the rejections over all starts of the controller."""
    last = ends(records)
    found: Counter[str] = Counter()
    for record in last:
        found.update(record.rejected)
    return Rejected(dict(found.most_common()), sum(record.started for record in last))


def scored(records: Sequence[Rollout]) -> dict[str, Scoring]:
    """Sum the counts of each scoring stage over all starts of the controller; what is in flight or waiting is the latest's."""
    found: dict[str, Scoring] = {}
    for record in ends(records):
        for name, stage in record.scoring.items():
            found[name] = _sum(found[name], stage) if name in found else stage
    return found


def _sum(before: Scoring, stage: Scoring) -> Scoring:
    return Scoring(
        in_flight=stage.in_flight,
        waiting=stage.waiting,
        scored=before.scored + stage.scored,
        retried=before.retried + stage.retried,
        failed=dict(Counter(before.failed) + Counter(stage.failed)),
        seconds=before.seconds + stage.seconds,
    )


def describe(stage: Scoring) -> str:
    """Describe a stage in one line, without what is 0: "1,204 scored in 0.12 s each   3 failed (scorer_error 3)   2 retried"."""
    ended = stage.scored + sum(stage.failed.values())
    parts = [f"{stage.scored:,} scored" + (f" in {number(stage.seconds / ended, 's', 2)} each" if ended else "")]
    parts += [f"{sum(stage.failed.values()):,} failed ({counts(stage.failed)})"] if stage.failed else []
    parts += [f"{stage.retried:,} retried"] if stage.retried else []
    parts += [f"{stage.in_flight} in flight"] if stage.in_flight else []
    parts += [f"{stage.waiting} waiting"] if stage.waiting else []
    return "   ".join(parts)


def counts(by_reason: Mapping[str, int]) -> str:
    """Name the most frequent reasons with their counts: "scorer_error 80, scorer_timeout 4"."""
    most = Counter(by_reason).most_common()
    shown = [f"{reason} {count:,}" for reason, count in most[:_REASONS]]
    return ", ".join([*shown, *(["..."] if len(most) > _REASONS else [])])
