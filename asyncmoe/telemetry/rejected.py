"""Rejections, scoring and evaluations in words, for the terminal and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from asyncmoe.telemetry.format import number, percent
from asyncmoe.telemetry.gauges import ratio
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout, Scoring

_REASONS = 3


def rejected(records: Sequence[Rollout]) -> str:
    """Describe the rejected trajectories of a run, which the newest record counts: "64 % of 132 started (scorer_error 80)"; "" if there are
    none."""
    last = records[-1] if records else Rollout(time=0.0)
    share = ratio(sum(last.rejected.values()), last.started)
    return f"{percent(share)} of {number(last.started)} started ({counts(last.rejected)})" if last.rejected else ""


def describe(stage: Scoring) -> str:
    """Describe a stage in one line: "1,204 scored in 0.12 s each   3 failed (scorer_error 3)"."""
    ended = stage.scored + sum(stage.failed.values())
    each = f" in {number(stage.seconds / ended, 's', 2)} each" if ended else ""
    failed = f"   {sum(stage.failed.values()):,} failed ({counts(stage.failed)})" if stage.failed else ""
    return f"{stage.scored:,} scored{each}{failed}"


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
    return ", ".join(f"{reason} {count:,}" for reason, count in Counter(by_reason).most_common(_REASONS))
