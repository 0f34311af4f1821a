"""Records of training steps for metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncmoe.errors import InvariantBroken
from asyncmoe.rpc.messages import Leased, Phase
from asyncmoe.telemetry import distribution
from asyncmoe.telemetry.clock import unix
from asyncmoe.telemetry.measured import MOST_NAMES, means
from asyncmoe.telemetry.metric import declared
from asyncmoe.telemetry.schema import Step
from asyncmoe.trainer.data import trees
from asyncmoe.trainer.data.credit import credit_figures

if TYPE_CHECKING:  # all import Megatron
    from asyncmoe.trainer.learned import Learned
    from asyncmoe.trainer.model.checkpoint_saver import Stood
    from asyncmoe.weights.sender.publisher import Published

_LENGTHS = (0.1, 0.5, 0.9, 1.0)
"""Recorded quantiles of response lengths."""


def step_record(
    step: int,
    leased: Leased,
    phase: Phase,
    learned: Learned,
    published: Published | None,
    waited: float,
    times: tuple[float, float, float, float],
    stood: Stood,
    switched: Mapping[str, float] | None = None,
) -> Step:
    """Build the metrics.jsonl record of a step.

    Args:
        step: steps taken, this one included.
        learned: the result of training; the figures of its updates go to the fields of the same names.
        published: the last version published by the end of the step; None if an earlier step reported it.
        waited: seconds the step waited for weight sync.
        stood: how long training has stood still for checkpoints since the previous step's record.
        switched: what devices' changes of hands have taken since then, in seconds by part; None: devices are not shared.
        times: Unix times at which the step began, asked for its batch, could train it and finished training.

    Raises:
        InvariantBroken: a figure has no field.
    """
    begin, asked, got, trained = times
    end = unix()
    items, updates, last = leased.items, learned.updates, learned.updates[-1]
    tree = trees.numbers(items)
    rows, tokens = sum(u.rows for u in updates), sum(u.tokens for u in updates)
    common = Step(
        step=step,
        phase=phase,
        time=end,
        step_seconds=end - begin,
        wait_seconds=got - asked,
        train_seconds=trained - got,
        sync_wait_seconds=waited,
        sync_seconds=published.seconds if published else None,
        switch_seconds=switched or None,
        pause_ms=published.pause_ms if published else None,
        sync_bytes=published.traffic.nbytes if published and published.traffic else None,
        sync_changed=published.traffic.changed if published and published.traffic else None,
        version=step,
        lineage=leased.lineage,
        loss=sum(u.loss for u in updates) / len(updates),
        grad_norm=last.grad_norm,
        lr=last.lr,
        entropy=sum(u.entropy for u in updates) / len(updates),
        tokens=rows,
        tokens_per_s=rows / (end - begin),
        response_tokens_mean=tokens / len(set(tree)),
        queue_depth=leased.queue_depth,
        dropped=leased.dropped,
        anomalies=dict(learned.anomalies) or None,
        skipped_updates=sum(update.refused for update in updates) or None,
        checkpoint_s=stood.seconds or None,
        checkpoint_wait_s=stood.waited or None,
        **combined([update.figures for update in updates]),
    )
    if phase == "warmup":
        return common
    ages = common.ages or {}
    rewards = trees.rewards(items)
    lengths = np.quantile(trees.totals([item.sampled for item in items], tree), _LENGTHS)
    return msgspec.structs.replace(
        common,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        rewards=distribution.counts(rewards),
        metrics=means(trees.metrics(items), MOST_NAMES) or None,
        response_tokens_quantiles={str(share): float(length) for share, length in zip(_LENGTHS, lengths, strict=True)},
        truncated_fraction=sum(item.truncated for item in items) / len(items),
        routing_mismatch=_mean_by_key([u.routing_mismatch for u in updates]) or None,
        staleness_max=max(ages, default=None),
        staleness_mean=sum(age * count for age, count in ages.items()) / max(tokens, 1),
        **credit_figures(items),
    )


def combined(updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine each figure over a step's optimizer updates, as `Metric.over_updates` of its field in `Step` says.

    Raises:
        InvariantBroken: a figure has no field.
    """
    fields = declared(Step)
    names = sorted({name for figures in updates for name in figures})
    if unknown := [name for name in names if name not in fields]:
        raise InvariantBroken(f"figures without a declaration: {', '.join(unknown)}; declare them in asyncmoe/telemetry/schema.py (Step)")
    return {name: _combine(fields[name].over_updates, [figures.get(name) for figures in updates]) for name in names}


def _combine(how: str, each: Sequence[Any]) -> Any:
    known = [value for value in each if value is not None]
    if how == "first" or not known:
        return each[0]
    if isinstance(known[0], Mapping):
        return (_sum_by_key(known) if how == "sum" else _mean_by_key(known)) or None
    return sum(known) if how == "sum" else float(np.mean(known))


def _sum_by_key(each: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Sums by key; a missing key counts as 0."""
    return {key: sum(one.get(key, 0) for one in each) for key in sorted({key for one in each for key in one})}


def _mean_by_key(each: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    return {key: total / len(each) for key, total in _sum_by_key(each).items()}
