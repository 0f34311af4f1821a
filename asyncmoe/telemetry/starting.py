"""The phases of a run's start, for the terminal: until the first step nothing else is to be seen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncmoe.telemetry.heartbeats import SERVES, TRAINER, Beat
from asyncmoe.telemetry.rollout_schema import Rollout


def phases(beats: Iterable[Beat], rollouts: Sequence[Rollout]) -> list[str]:
    """Return what a run has reached, in words.

    Args:
        beats: the newest heartbeat of each process.
        rollouts: the controller's first record since this start of the run, whose counts go on from earlier starts, and its newest.
    """
    found = [f"{one.role} is ready" for one in beats if one.does == SERVES]
    if any(one.role == f"{TRAINER}0" for one in beats):  # a rank's first heartbeat is that it waits for a batch or for engines
        found.append("the trainer has loaded the model")
    if any(one.engines_serving for one in rollouts):
        found.append("engines have the trainer's weights")
    if any(one.accepted > rollouts[0].accepted for one in rollouts):
        found.append("the first group is scored")
    return found
