"""The phases of a run's start, for the terminal, which shows nothing else until the first step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncmoe.telemetry.heartbeats import SERVES, Beat
from asyncmoe.telemetry.rollout_schema import Rollout


def phases(beats: Iterable[Beat], rollouts: Sequence[Rollout]) -> list[str]:
    """Return what a run has reached, in words.

    Args:
        beats: the newest heartbeat of each process.
        rollouts: the controller's first and newest records since this start of the run; their counts include earlier starts.
    """
    engines = {one.role for one in beats if one.does == SERVES}.union(*(one.engine_utilization for one in rollouts))
    found = [f"{name} is ready" for name in sorted(engines)]
    if rollouts:  # the controller writes records only once a trainer has joined, which it does after loading its model
        found.append("the trainer has loaded the model")
    if any(one.engines_serving for one in rollouts):
        found.append("engines have the trainer's weights")
    if any(one.accepted > rollouts[0].accepted for one in rollouts):
        found.append("the first group is scored")
    return found
