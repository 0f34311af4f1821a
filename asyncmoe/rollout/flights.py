"""Groups in progress, and what runs their episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncmoe.queue.group_buffer import Group
from asyncmoe.queue.start_order import Start
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rpc.worker_messages import Made

LOST = "worker_lost"
"""Reason of a rejection: the worker that ran the episode is gone."""


class Workers(Protocol):
    """All rollout workers: they run episodes, and hold what these bring."""

    async def episode(self, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of training. Raises TrajectoryRejected."""
        ...

    async def evaluate(self, name: str, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of an evaluation set. Raises TrajectoryRejected."""
        ...

    async def show(self, first: int, count: int) -> Sequence[Group]:
        """Return demonstrations of the warm-up, `count` from number `first` on: a group of one for each trajectory."""
        ...

    async def pack(self, episodes: Sequence[EpisodeId], newest: int) -> Group:
        """Return the group of these episodes, checked; `newest`: version that may have sampled a token. Raises TrajectoryRejected."""
        ...

    def forget(self, episodes: Sequence[EpisodeId], groups: Sequence[int]) -> None:
        """End and forget the episodes of groups that are given up or start again."""
        ...


@dataclass
class Flight:
    """One group in progress, and its episodes."""

    group: Start
    prompt: Prompt
    places: Sequence[EpisodeId]
