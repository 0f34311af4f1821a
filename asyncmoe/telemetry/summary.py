"""The summary of a run: about a dozen numbers, and descriptions of what was rejected, scored and evaluated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, NamedTuple

import msgspec

from asyncmoe import storage
from asyncmoe.telemetry.format import ABSENT, duration, named, number, percent, quantity
from asyncmoe.telemetry.measured import known, mean, median, share, standard_error
from asyncmoe.telemetry.metric import Amount, Count, Metric, declared
from asyncmoe.telemetry.overlap import Interval, intersection, length
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout, Scoring
from asyncmoe.telemetry.run import RunRecords, load, no_step

ENDS = 5
"""Number of RL steps over which `reward_first` and `reward_last` are averaged."""
_REASONS = 3


class Row(NamedTuple):
    """A row of the summary for people.

    Attributes:
        meaning: what the number is, the same for every run.
        detail: more about this run's value.
        number, unit: the value as a number, and its `metric.Metric.unit`.
        error: standard error of the number, where known.
    """

    name: str
    value: str
    meaning: str
    detail: str = ""
    number: float | None = None
    unit: str = ""
    error: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers about the RL steps of a run, without warm-up.

    RL time is `RunRecords.rl_windows`. None: not measured, because there is no RL step, no span or no update. Superseded steps (made by a
    killed trainer after the checkpoint from which the run resumed) are excluded. The updates are the RL steps with `sync_seconds` above 0.
    """

    steps: Annotated[int, Metric("RL steps.")]
    reward_first: Annotated[Amount, Metric("Mean of reward_mean over the first 5 RL steps, or all if there are fewer.")]
    reward_last: Annotated[Amount, Metric("Mean of reward_mean over the last 5 RL steps.")]
    tokens_per_s: Annotated[Amount, Metric("Trained tokens, prompt and response, over RL time.", "tokens/s")]
    max_staleness_seen: Annotated[Amount, Metric("Largest age of a trained token.", "versions")]
    sync_seconds_median: Annotated[Amount, Metric("Median of sync_seconds over the updates.", "seconds")]
    switch_seconds: Annotated[dict[str, float] | None, "Median of switch_seconds over the RL steps, by part."]
    pause_ms_median: Annotated[Amount, Metric("Median of pause_ms over the updates: how long engines paused.", "milliseconds")]
    max_abs_logprob_diff_same_version: Annotated[
        Amount, Metric("Largest |trainer - engine| log-probability on trained tokens of the same version, if there were any.", "nats")
    ]
    same_version_tokens: Annotated[Count, Metric("Tokens compared for max_abs_logprob_diff_same_version.", "tokens")]
    same_version_versions: Annotated[Count, Metric("Number of versions among the compared tokens.", "versions")]
    train_infer_kl_mean: Annotated[Amount, Metric("Mean of train_infer_kl over the RL steps; staleness included.", "nats a token")]
    routing_mismatch_mean: Annotated[
        Amount, Metric("Tokens that the trainer's router would have sent elsewhere; mean over layers and steps.", "share of tokens")
    ]
    trainer_idle_share: Annotated[
        Amount, Metric("RL time in which the trainer waited for a batch. Absent if trainer and engines took turns.", "share of RL time")
    ]
    engine_idle_share: Annotated[
        Amount,
        Metric("Mean RL time in which an engine generated nothing although it was its turn, if they took turns.", "share of RL time"),
    ]
    overlap_share: Annotated[
        Amount, Metric("RL training time of trainer.0 in which at least one engine generated.", "share of training time")
    ]
    wall_seconds: Annotated[float, Metric("RL time.", "seconds")]
    evaluation_first: Annotated[dict[str, Evaluation], "Each set's evaluation of the lowest version, by name; empty without sets."]
    evaluation_last: Annotated[dict[str, Evaluation], "Each set's evaluation of the highest version."]
    rejected_share: Annotated[float | None, "Rejected share of the started trajectories."]
    rejected: Annotated[dict[str, int] | None, "Rejected trajectories by reason."]
    trainer_restarts: Annotated[int, Metric("Starts in place after the trainer was lost, over all starts of the run.")] = 0


def write_summary(run_dir: Path) -> dict[str, object]:
    """Write run_dir/summary.json atomically and return its content.

    Raises:
        DataError: no step is recorded, or a line is malformed.
        StorageError: the file cannot be written.
    """
    run = load(run_dir)
    if not run.steps:
        raise no_step(run_dir)
    summary = summary_of(run)
    with storage.writing("summary of the run", run_dir / "summary.json"):
        storage.replace(run_dir / "summary.json", msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    found: dict[str, object] = msgspec.to_builtins(summary)
    return found


def summary_of(run: RunRecords) -> Summary:
    """Compute the summary; each field of `Summary` defines its number."""
    rl = run.rl
    wall = length(run.rl_windows)
    rewards = known(step.reward_mean for step in rl)
    updates = [step for step in rl if step.sync_seconds]
    last = run.rollout[-1] if run.rollout else None
    switches = [step.switch_seconds for step in rl if step.switch_seconds]
    parts = {part: median(one.get(part) for one in switches) or 0.0 for part in dict.fromkeys(part for one in switches for part in one)}
    turns = intersection(run.intervals("wait", "trainer.0"), run.rl_windows) if switches else run.rl_windows
    return Summary(
        steps=len(rl),
        reward_first=fmean(rewards[:ENDS]) if rewards else None,
        reward_last=fmean(rewards[-ENDS:]) if rewards else None,
        tokens_per_s=share((step.tokens for step in rl), wall),
        max_staleness_seen=max(known(step.staleness_max for step in rl), default=None),
        sync_seconds_median=median(step.sync_seconds for step in updates),
        switch_seconds=parts or None,
        pause_ms_median=median(step.pause_ms for step in updates),
        max_abs_logprob_diff_same_version=max(known(step.logprob_diff_max_same_version for step in rl), default=None),
        same_version_tokens=sum(step.logprob_tokens_same_version or 0 for step in rl) or None,
        same_version_versions=len({step.version for step in rl if step.logprob_tokens_same_version}) or None,
        train_infer_kl_mean=mean(step.train_infer_kl for step in rl),
        routing_mismatch_mean=mean(sent for step in rl for sent in (step.routing_mismatch or {}).values()),
        trainer_idle_share=None if switches else share((step.wait_seconds for step in rl), wall),
        engine_idle_share=_engine_idle_share(run, turns),
        overlap_share=overlap_share(run),
        wall_seconds=wall,
        evaluation_first={one.name: one for one in reversed(run.evaluations)},
        evaluation_last={one.name: one for one in run.evaluations},
        rejected_share=_rejected_share(last) if last else None,
        rejected=dict(last.rejected) if last else None,
        trainer_restarts=run.trainer_restarts,
    )


def what_it_was(run: RunRecords, summary: Summary) -> str:
    """Return the length of the run in words."""
    warmup = len(run.steps) - summary.steps
    parts = [f"{summary.steps} RL steps in {duration(summary.wall_seconds)}" if summary.steps else "no RL step yet"]
    parts += [f"after {warmup} warm-up steps"] if warmup else []
    parts += [f"{len(run.engines)} engine{'s' if len(run.engines) > 1 else ''}"] if run.engines else []
    parts += [f"started {len(run.sessions)} times"] if len(run.sessions) > 1 else []
    return " · ".join(parts)


def rows(run: RunRecords, summary: Summary) -> list[Row]:
    """Return what was measured as a table, with rows for evaluations, stages of scoring, and rejections. If a run has so few steps that its
    first steps are also its last, `reward_first` is left out."""
    rewards = known(step.reward_mean for step in run.rl)
    errors = {"reward_first": standard_error(rewards[:ENDS]), "reward_last": standard_error(rewards[-ENDS:])}
    found = [
        Row(name.replace("_", " "), _shown(value, one.unit, errors.get(name)), one.help, "", value, one.unit, errors.get(name))
        for name, one in declared(Summary).items()
        if (value := getattr(summary, name)) is not None and (name != "reward_first" or len(rewards) > ENDS)
    ]
    if parts := summary.switch_seconds:
        meaning, taken = "Median time a step in which shared devices changed hands.", sum(parts.values())
        found.append(Row("switch seconds", duration(taken), meaning, by_part(parts), taken, "seconds"))
    for when, version, sets in (("first", "lowest", summary.evaluation_first), ("last", "highest", summary.evaluation_last)):
        meaning = f"Mean reward of the {version} version evaluated."
        for name, one in sorted(sets.items()):
            label, reward, error = " ".join(("evaluation", when, name)).strip(), one.reward_mean, one.reward_stderr
            found.append(Row(label, _shown(reward, "", error), meaning, " · ".join(_about(one)), reward, "", error))
    for record in run.rollout[-1:]:
        for name, stage in record.scoring.items():
            found.append(Row(name, number(stage.scored), "Scored samples.", describe(stage), stage.scored))
        gone = summary.rejected_share
        found.append(Row("rejected", percent(gone), "Rejected trajectories.", rejected(run.rollout), gone, "share"))
    return found


def by_part(seconds: Mapping[str, float]) -> str:
    """Name the parts of a switch: "trainer_out 0.2 s, update 1.1 s"."""
    return ", ".join(f"{part} {duration(one)}" for part, one in seconds.items())


def difference(first: Row, second: Row) -> str:
    """Describe the second run's value minus the first's, with the standard error of the difference of independent runs where both errors
    are known: "+0.12 ± 0.071". A difference of shares is in points (hundredths)."""
    if first.number is None or second.number is None:
        return ABSENT
    by = second.number - first.number
    error = None if first.error is None or second.error is None else math.hypot(first.error, second.error)
    return f"{'+' if by > 0 else '-' if by < 0 else ''}{_shown(abs(by), first.unit, error)}".replace(" %", " points")


def _shown(value: float | None, unit: str, error: float | None = None) -> str:
    text = quantity(value, unit) if unit.startswith("share") or unit in ("seconds", "milliseconds") else number(value, unit)
    return text if error is None else f"{text} ± {number(error, digits=2)}"


def overlap_share(run: RunRecords) -> float | None:
    """Return the share of the trainer's training time, within RL time, in which at least one engine was generating."""
    train = intersection(run.intervals("train", "trainer.0"), run.rl_windows)
    return share([length(intersection(train, run.intervals("generate")))], length(train))


def _engine_idle_share(run: RunRecords, during: Sequence[Interval]) -> float | None:
    if not run.engines or not (whole := length(during)):
        return None
    return 1 - fmean(length(intersection(run.intervals("generate", engine), during)) for engine in run.engines) / whole


def _rejected_share(last: Rollout) -> float | None:
    return share([sum(last.rejected.values())], last.started)


def rejected(records: Sequence[Rollout]) -> str:
    """Describe the rejected trajectories of a run, by the newest record: "64 % of 132 started (scorer_error 80)"; "" without any."""
    last = records[-1] if records else Rollout(time=0.0)
    return f"{percent(_rejected_share(last))} of {number(last.started)} started ({counts(last.rejected)})" if last.rejected else ""


def describe(stage: Scoring) -> str:
    """Describe a stage in one line: "1,204 scored in 0.12 s each   3 failed (scorer_error 3)"."""
    ended = stage.scored + sum(stage.failed.values())
    each = f" in {number(stage.seconds / ended, 's', 2)} each" if ended else ""
    failed = f"   {sum(stage.failed.values()):,} failed ({counts(stage.failed)})" if stage.failed else ""
    return f"{stage.scored:,} scored{each}{failed}"


def evaluated(record: Evaluation) -> str:
    """Describe an evaluation: "version 20   math   reward 0.43 ± 0.05   pass@4 0.7   25 % failed"; omits an absent name, pass@k or
    failures."""
    version, *more = _about(record)
    reward = _shown(record.reward_mean, "", record.reward_stderr)
    return "   ".join([version, *([record.name] if record.name else []), f"reward {reward}", *more])


def _about(record: Evaluation) -> list[str]:
    failed = [f"{percent(record.failed_share)} failed"] if record.failed_share else []
    passed = [f"pass@{record.samples} {number(passing)}" for k, passing in record.pass_at.items() if k == str(record.samples) != "1"]
    return [f"version {record.version}", *passed, *named(record.metrics), *failed]


def counts(by_reason: Mapping[str, int]) -> str:
    """Name the most frequent reasons with their counts: "scorer_error 80, scorer_timeout 4"."""
    return ", ".join(f"{reason} {count:,}" for reason, count in Counter(by_reason).most_common(_REASONS))
