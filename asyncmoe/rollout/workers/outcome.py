"""How an episode on a rollout worker ended, as far as the controller needs to know."""

from __future__ import annotations

from dataclasses import dataclass

LOST = "worker_lost"
"""Reason of a rejection: the worker that ran the episode is gone."""
RUN_FAILED = "run_failed"
"""Reason in a worker's news: not the episode failed, but something that the run cannot go on without."""


@dataclass(frozen=True)
class RemoteTrajectory:
    """A trajectory that a worker holds; fields as in `asyncmoe.trajectory.Trajectory`."""

    group: int
    episode: int
    attempt: int
    agent: int
    reward: float
