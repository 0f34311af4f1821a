"""Records of training steps for metrics.jsonl."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from asyncmoe.rpc.messages import Leased, Phase
from asyncmoe.telemetry.schema import Step
from asyncmoe.trainer.data.credit import credit_figures
from asyncmoe.trainer.step import StepMetrics
from asyncmoe.trainer.weight_sync.publisher import Published

_FIGURES = {
    "kl": "kl_engine",
    "kl_reference": "kl_reference",
    "clip_fraction": "clip_fraction",
    "tis_capped_fraction": "tis_capped_fraction",
    "ratio_mean": "ratio_mean",
    "ess": "ess",
    "rejected_fraction": "rejected_fraction",
    "logprob_diff_max_same_version": "logprob_diff_max_same_version",
    "logprob_diff_mean_same_version": "logprob_diff_mean_same_version",
}
"""Scalar figures of an objective (`objective.metrics`), and their names in the record."""
_BY_KEY = ("ratio_quantiles", "rejected_by_rule", "rejected_by_age")


def step_record(
    step: int,
    leased: Leased,
    phase: Phase,
    updates: Sequence[StepMetrics],
    published: Published | None,
    waited: float,
    times: tuple[float, float, float],
) -> Step:
    """Build the metrics.jsonl record of a step.

    Args:
        step: steps taken, this one included.
        updates: metrics of the step's optimizer updates.
        published: the last version published by the end of the step; None if an earlier step reported it.
        waited: seconds the step waited for weight sync.
        times: Unix times at which the step began, received its batch and finished training.
    """
    begin, got, trained = times
    end = time.time()
    items, last = leased.items, updates[-1]
    rows, tokens = sum(u.rows for u in updates), sum(u.tokens for u in updates)
    common = Step(
        step=step,
        phase=phase,
        time=end,
        step_seconds=end - begin,
        wait_seconds=got - begin,
        train_seconds=trained - got,
        sync_wait_seconds=waited,
        sync_seconds=published.seconds if published else None,
        pause_ms=published.pause_ms if published else None,
        version=step,
        loss=sum(u.loss for u in updates) / len(updates),
        grad_norm=last.grad_norm,
        lr=last.lr,
        entropy=sum(u.entropy for u in updates) / len(updates),
        tokens=rows,
        tokens_per_s=rows / (end - begin),
        response_tokens_mean=tokens / len(items),
        queue_depth=leased.queue_depth,
        dropped=leased.dropped,
    )
    if phase == "warmup":
        return common
    ages: dict[int, int] = {}
    for update in updates:
        for age, count in update.figures["ages"].items():
            ages[age] = ages.get(age, 0) + count
    rewards = np.array([item.reward for item in items])
    # Engine and trainer have the same weights only in a batch's first update.
    same_version = {name: updates[0].figures[name] for name in _FIGURES if name.endswith("same_version")}
    figures = {name: _mean(u.figures[name] for u in updates) for name in _FIGURES} | same_version
    return msgspec.structs.replace(
        common,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        **credit_figures(items),
        staleness_max=max(ages),
        staleness_mean=sum(age * count for age, count in ages.items()) / max(tokens, 1),
        ages=ages,
        plugin_metrics=_by_key([u.figures["plugin_metrics"] for u in updates]) or None,
        routing_differs=_by_key([u.routing_differs for u in updates]) or None,
        **{record: figures[name] for name, record in _FIGURES.items()},
        **{name: _by_key([u.figures[name] for u in updates]) for name in _BY_KEY},
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _by_key(each: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Means by key; a missing key counts as 0."""
    return {key: sum(one.get(key, 0.0) for one in each) / len(each) for key in sorted({key for one in each for key in one})}
