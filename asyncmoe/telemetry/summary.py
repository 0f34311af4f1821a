"""The summary of a run: about a dozen numbers."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean

import msgspec

from asyncmoe.storage import writing
from asyncmoe.telemetry.gauges import known, mean, median, ratio, sum_over
from asyncmoe.telemetry.overlap import intersection, length
from asyncmoe.telemetry.rejected import ends, rejected
from asyncmoe.telemetry.rollout_schema import Evaluation
from asyncmoe.telemetry.run import RunRecords, load

ENDS = 5
"""Number of RL steps over which `reward_first` and `reward_last` are averaged."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers about the RL steps of a run, without warm-up.

    RL time is `RunRecords.rl_windows`. None: not measured, because there is no RL step, no span or no update. Superseded steps (made by a
    killed trainer after the checkpoint from which the run resumed) are excluded.
    """

    steps: int
    """Number of RL steps."""
    reward_first: float | None
    """Mean of `reward_mean` over the first 5 RL steps (over all, if there are fewer)."""
    reward_last: float | None
    """Mean of `reward_mean` over the last 5 RL steps."""
    tokens_per_s: float | None
    """Trained tokens, prompt and response, of all RL steps / `wall_seconds`."""
    max_staleness_seen: float | None
    """Largest `staleness_max` of an RL step, in versions."""
    sync_seconds_median: float | None
    """Median of `sync_seconds` over the updates, i.e. RL steps with `sync_seconds` > 0."""
    pause_ms_median: float | None
    """Median of `pause_ms` over the updates."""
    max_abs_logprob_diff_same_version: float | None
    """Largest `logprob_diff_max_same_version` of an RL step, in nats; None if no step had a token to compare."""
    same_version_tokens: int | None
    """Number of the tokens compared for it; None like it."""
    same_version_versions: int | None
    """Number of versions that they are of; None like it."""
    max_abs_probe_diff: float | None
    """Largest `probe_diff_max` of a version, in nats: engine and trainer on probe tokens of versions chosen by `verify.probe_every`; None
    if none was compared."""
    probe_tokens: int | None
    """Number of the probe tokens compared for it; None like it."""
    probe_versions: int | None
    """Number of versions that they are of; None like it."""
    train_infer_kl_mean: float | None
    """Mean of `train_infer_kl` over the RL steps, in nats per token."""
    routing_mismatch_mean: float | None
    """Mean of `routing_mismatch` over layers and RL steps; None if routing was not recorded."""
    trainer_idle_share: float | None
    """Sum of `wait_seconds` of the RL steps / `wall_seconds`."""
    engine_idle_share: float | None
    """1 - (union of an engine's generate spans within RL time) / `wall_seconds`; mean over engines."""
    overlap_share: float | None
    """|train spans of trainer.0 within RL time ∩ union of all engines' generate spans| / |train spans of trainer.0 within RL time|."""
    wall_seconds: float
    """Length of RL time in seconds."""
    evaluation_first: Evaluation | None
    """Evaluation of the lowest version, of its first set; None without evaluations."""
    evaluation_last: Evaluation | None
    """Evaluation of the highest version, of the same set; None without evaluations."""
    rejected_share: float | None
    """Rejected share of the started trajectories, over all starts of the controller; None if none was started."""
    rejected: dict[str, int] | None
    """Rejected trajectories by reason, over all starts of the controller; None without rollout records."""
    trainer_restarts: int = 0
    """Number of times that the trainer was lost and started again in place, over all starts of the run."""


def summarise(run_dir: Path) -> dict[str, object]:
    """Read a run directory and return the fields of `Summary` by name.

    Raises:
        DataError: no step is recorded, or a line is malformed.
    """
    found: dict[str, object] = msgspec.to_builtins(summary_of(load(run_dir)))
    return found


def write_summary(run_dir: Path) -> dict[str, object]:
    """Write run_dir/summary.json atomically and return its content.

    Raises:
        DataError: no step is recorded, or a line is malformed.
        StorageError: it cannot be written.
    """
    summary = summarise(run_dir)
    part = run_dir / f".summary.json.{os.getpid()}"
    with writing("summary of the run", run_dir / "summary.json"):
        part.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        part.replace(run_dir / "summary.json")
    return summary


def summary_of(run: RunRecords) -> Summary:
    """Compute the summary; each field of `Summary` defines its number."""
    rl = run.rl
    wall = length(run.rl_windows)
    rewards = known(step.reward_mean for step in rl)
    updates = [step for step in rl if step.sync_seconds]
    gone, starts = rejected(run.rollout), ends(run.rollout)
    return Summary(
        steps=len(rl),
        reward_first=fmean(rewards[:ENDS]) if rewards else None,
        reward_last=fmean(rewards[-ENDS:]) if rewards else None,
        tokens_per_s=ratio(sum(step.tokens or 0 for step in rl), wall),
        max_staleness_seen=max(known(step.staleness_max for step in rl), default=None),
        sync_seconds_median=median(step.sync_seconds for step in updates),
        pause_ms_median=median(step.pause_ms for step in updates),
        max_abs_logprob_diff_same_version=max(known(step.logprob_diff_max_same_version for step in rl), default=None),
        same_version_tokens=sum(step.logprob_tokens_same_version or 0 for step in rl) or None,
        same_version_versions=len({step.version for step in rl if step.logprob_tokens_same_version}) or None,
        max_abs_probe_diff=max(known(record.probe_diff_max for record in run.rollout), default=None),
        probe_tokens=sum(counts.probed_tokens for counts in starts) or None,
        probe_versions=sum(counts.probed_versions for counts in starts) or None,
        train_infer_kl_mean=mean(step.train_infer_kl for step in rl),
        routing_mismatch_mean=mean([share for step in rl for share in (step.routing_mismatch or {}).values()]),
        trainer_idle_share=sum_over((step.wait_seconds for step in rl), wall),
        engine_idle_share=_engine_idle_share(run, wall),
        overlap_share=overlap_share(run),
        wall_seconds=wall,
        evaluation_first=run.evaluations[0] if run.evaluations else None,
        evaluation_last=next((one for one in reversed(run.evaluations) if one.name == run.evaluations[0].name), None),
        rejected_share=gone.share,
        rejected=dict(gone.by_reason) if run.rollout else None,
        trainer_restarts=run.trainer_restarts,
    )


def overlap_share(run: RunRecords) -> float | None:
    """Return the share of the trainer's training time, within RL time, in which at least one engine was generating."""
    train = intersection(run.intervals("train", "trainer.0"), run.rl_windows)
    return ratio(length(intersection(train, run.intervals("generate"))), length(train))


def _engine_idle_share(run: RunRecords, wall: float) -> float | None:
    if not run.engines or wall <= 0:
        return None
    busy = [length(intersection(run.intervals("generate", engine), run.rl_windows)) for engine in run.engines]
    return 1 - fmean(busy) / wall
