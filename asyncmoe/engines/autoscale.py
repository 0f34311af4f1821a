"""How many engines a run should have: pure. The controller reports it (`engines_advised`).

Two queues say who waits for whom, on average over the last `patience_s`. While the trainer waits for engines, the queue between them grows
from nothing to a batch and is taken at once: half a batch on average. With less than `low` batches there, and requests that fill the
engines, an engine is missing. An empty queue alone is no reason: with all places of the capacity law taken, another engine would have
nothing to do. With `high` batches, or so few requests that an engine less could run them all, an engine is too many.

Hysteresis. A reason must hold for `patience_s` without a break before it is followed, and again after each change of the engines. It is not
followed while the queue already moves the right way: the last change is enough then, and one more would overshoot. Between `low` and `high`
there is no reason, so a number of engines that keeps the queue there is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncmoe.errors import ConfigError


@dataclass(frozen=True)
class Scaling:
    """The bounds.

    Attributes:
        least, most: engines.
        low, high: batches in the queue.
        patience_s: seconds for which a reason must hold.

    Raises:
        ConfigError: bounds in the wrong order.
    """

    least: int
    most: int
    low: float = 0.75
    high: float = 1.5
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError("autoscaling", got=f"{self.least} to {self.most} engines", expected="at least one, the least first")
        if not 0 <= self.low < self.high:
            raise ConfigError("autoscaling", got=f"{self.low:g} to {self.high:g} batches", expected="none negative, the least first")


_MOST_BUSY = 2.0
"""How much a long line of requests counts."""
_STILL = 0.05
"""Batches by which a queue may move and still stand."""
SCALING = Scaling(1, 1 << 20)
"""Of what a run reports: advice, whatever number of engines there can be."""


@dataclass(frozen=True)
class EngineLoad:
    """What is known at one moment.

    Attributes:
        now: seconds.
        depth: complete batches in the queue.
        busy: requests at engines or waiting for one, as a share of what the engines run at once.
        engines: that serve, or are about to.
    """

    now: float
    depth: float
    busy: float
    engines: int


@dataclass(frozen=True)
class Advice:
    """What follows from all loads so far.

    Attributes:
        engines: wanted.
        serving: engines of the last load.
        reason: 1: an engine is missing; -1: one is too many; 0: neither.
        since, depth_then: when the reason began to hold with these engines, or was last looked at; and the queue then.
        now: of the last load.
        depth, busy: means.
    """

    engines: int = 0
    serving: int = -1
    reason: int = 0
    since: float = 0.0
    depth_then: float = 0.0
    now: float = -math.inf
    depth: float = 0.0
    busy: float = 0.0


def advise(before: Advice, load: EngineLoad, scaling: Scaling) -> Advice:
    """Return the advice after one more load: at most one engine more or less than serve, but always within the bounds."""
    kept = math.exp((before.now - load.now) / scaling.patience_s)
    depth = kept * before.depth + (1 - kept) * load.depth
    busy = kept * before.busy + (1 - kept) * min(load.busy, _MOST_BUSY)
    reason = int(depth < scaling.low and busy >= 1) - int(depth >= scaling.high or busy * load.engines <= load.engines - 1)
    if load.engines != before.serving or reason != before.reason:
        change = 0 if load.engines != before.serving else before.engines - before.serving
        since, then = load.now, depth
    elif load.now - before.since >= scaling.patience_s:
        change = reason if (depth - before.depth_then) * reason <= _STILL else 0
        since, then = load.now, depth
    else:
        change, since, then = before.engines - before.serving, before.since, before.depth_then
    wanted = min(max(load.engines + change, scaling.least), scaling.most)
    return Advice(wanted, load.engines, reason, since, then, load.now, depth, busy)
