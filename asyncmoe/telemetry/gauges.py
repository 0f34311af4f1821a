"""Gauges: aggregate numbers of a sequence of steps and rollout records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.schema import Step


@dataclass(frozen=True)
class Gauges:
    """Aggregates of steps and rollout records. None: not measured. Shares are 0 to 1."""

    steps: int = 0
    """Number of RL steps."""
    reward: float | None = None
    reward_std: float | None = None
    """Largest standard deviation of rewards within a step."""
    step_seconds: float | None = None
    trainer_idle: float | None = None
    """Median over the steps of the idle share of a step: one slow start does not move it."""
    engine_idle: float | None = None
    """Idle share of the engines after the first step, which waits for the start of engines."""
    sync_seconds: float | None = None
    sync_share: float | None = None
    """Share of the steps' time that the trainer spent waiting for weight sync."""
    pause_ms: float | None = None
    clip_fraction: float | None = None
    tis_capped: float | None = None
    logprob_diff: float | None = None
    dropped: float | None = None
    """Trajectories dropped or requeued as too old, as a share of accepted trajectories."""
    rejected: float | None = None
    """Rejected share of the started trajectories."""
    rejected_most: str | None = None
    """Most frequent reason for rejection."""


def gauge(rl: Sequence[Step], rollout: Sequence[Rollout] = ()) -> Gauges:
    """Compute gauges from RL steps and rollout records, both oldest first. Counters come from the newest rollout record."""
    seconds = sum(step.step_seconds or 0.0 for step in rl)
    updates = [step for step in rl if step.sync_seconds]
    last = rollout[-1] if rollout else None
    settled = [record for record in rollout if rl and record.time > rl[0].time]
    busy = mean(share for record in settled for share in record.engine_utilization.values())
    return Gauges(
        steps=len(rl),
        reward=mean(step.reward_mean for step in rl),
        reward_std=max(known(step.reward_std for step in rl), default=None),
        step_seconds=median(step.step_seconds for step in rl),
        trainer_idle=median(sum_over((step.wait_seconds,), step.step_seconds or 0.0) for step in rl),
        engine_idle=None if busy is None else 1 - busy,
        sync_seconds=median(step.sync_seconds for step in updates),
        sync_share=sum_over((step.sync_wait_seconds for step in rl), seconds),
        pause_ms=median(step.pause_ms for step in updates),
        clip_fraction=mean(step.clip_fraction for step in rl),
        tis_capped=mean(step.tis_capped_fraction for step in rl),
        logprob_diff=max(known(step.logprob_diff_max_same_version for step in rl), default=None),
        dropped=ratio(last.dropped.get("stale", 0) + last.requeued.get("stale", 0), last.accepted) if last else None,
        rejected=ratio(sum(last.rejected.values()), last.started) if last else None,
        rejected_most=max(last.rejected, key=last.rejected.__getitem__, default=None) if last else None,
    )


def known(values: Iterable[float | None]) -> list[float]:
    """Return the measured values."""
    return [value for value in values if value is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the measured values; None without any."""
    measured = known(values)
    return statistics.fmean(measured) if measured else None


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the measured values; None without any."""
    measured = known(values)
    return statistics.median(measured) if measured else None


def sum_over(values: Iterable[float | None], whole: float) -> float | None:
    """Return the sum of the measured values / `whole`; None without any, or if `whole` is not above 0."""
    measured = known(values)
    return ratio(sum(measured), whole) if measured else None


def ratio(part: float, whole: float) -> float | None:
    """Return `part` / `whole`; None if `whole` is not above 0."""
    return part / whole if whole > 0 else None
