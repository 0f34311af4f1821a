"""Runs episodes, makes whole groups of them, and holds these until they are over: in the controller, or in a process of its own
(`asyncmoe.rollout.workers.service`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from asyncmoe.config import Config
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.log.log import Place
from asyncmoe.queue import payload
from asyncmoe.queue.group_buffer import Group, whole
from asyncmoe.queue.queue_log import OWN
from asyncmoe.rollout import parts
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.run_log import WorkerLog
from asyncmoe.rollout.sampled_episodes import EpisodeNotes, SampledEpisode
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.telemetry.samples.choice import choice_of
from asyncmoe.trajectory import NOTHING, Buffer, Recording, Trajectory, part

Play = Callable[[Prompt, EpisodeId], Awaitable[tuple[Trajectory, ...]]]
Sampled = Callable[[EpisodeId, SampledEpisode], None]
_LONG = 1 << 17
"""Tokens of a group that is checked and encoded in a thread: for a smaller one the thread costs more than it spares the event loop."""


class Worker:
    """An `asyncmoe.rollout.flights.Workers`. For one event loop.

    Args:
        play: runs and scores one episode; raises TrajectoryRejected.
        group_size: number of episodes in a group.
        recording: data that each trajectory must carry.
        kept: where payloads and answers are kept; None: nowhere.
        number: of the worker, and so of what it writes.
        notes: of the episodes that are kept to be read.

    Attributes:
        sampled: called with what an episode leaves for readers of samples.
    """

    def __init__(
        self,
        play: Play,
        group_size: int,
        recording: Recording = NOTHING,
        kept: WorkerLog | None = None,
        number: int = OWN,
        notes: EpisodeNotes | None = None,
    ) -> None:
        self._play, self._size, self._recording, self._kept, self._number = play, group_size, recording, kept, number
        self._notes = notes
        self.sampled: Sampled = lambda place, left: None
        self._running: dict[EpisodeId, object] = {}
        self._ended: dict[int, dict[EpisodeId, tuple[Trajectory, ...]]] = {}
        """By the number of the group."""
        self._groups: dict[int, Group] = {}
        self._frames: dict[str, list[Buffer]] = {}
        self._writing: list[int] = []

    async def episode(self, prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
        """Run and score one episode, and keep its trajectories for `pack`. Raises as `play`."""
        mine = self._running[place] = object()
        try:
            made = await self._play(prompt, place)
            self._note(place, made)
            if self._running.get(place) is mine:  # else it was dropped while it ended
                self._ended.setdefault(place.group, {})[place] = made
            return made
        except TrajectoryRejected as rejected:
            self._note(place, rejected)
            raise
        finally:
            if self._running.get(place) is mine:
                self._note(place, None)  # if it was cancelled
                del self._running[place]

    async def pack(self, episodes: Sequence[EpisodeId], newest: int) -> Group:
        """Make a group of episodes that have ended; return once its payload is in the log.

        Raises:
            ProtocolError: one of them has not ended here.
            TrajectoryRejected: the group is unfit for training.
            StorageError: the log cannot be written.
        """
        ended = self._ended.get(episodes[0].group, {})
        if missing := [place.key() for place in episodes if place not in ended]:
            raise ProtocolError(f"pack: got {missing[0]}, expected episodes that have ended here")
        group = await self.hold([one for place in episodes for one in ended[place]], newest)
        self._forget_episodes(group.number)
        return group

    async def hold(self, trajectories: Sequence[Trajectory], newest: int) -> Group:
        """Check, write and hold a group. Raises as `pack`."""
        made = partial(whole, trajectories, self._size, self._recording, newest)
        group = await asyncio.to_thread(made) if sum(map(len, trajectories)) > _LONG else made()
        if self._kept is not None:
            position = await payload.write(self._kept.payloads, group, self._writing)
            group = replace(group, place=Place(self._number, position))
        self._groups[group.number] = group
        self._frames.update(group.frames)
        return group

    def fetch(self, keys: Sequence[str], layers: Sequence[int] | None, masks: bool) -> list[Buffer]:
        """Return encoded frames of held trajectories, as `asyncmoe.queue.bounded.BoundedQueue.fetch`. Raises ProtocolError."""
        if unknown := [key for key in keys if key not in self._frames]:
            raise ProtocolError(f"fetch: rollout worker {self._number} does not hold {unknown[0]}")
        return [frame for key in keys for frame in part(self._frames[key], layers, masks)]

    def stop(self, place: EpisodeId) -> None:
        """Forget an episode at once, whether it runs or has ended: the next attempt of its group may have one of the same name."""
        self._running.pop(place, None)
        self._ended.get(place.group, {}).pop(place, None)
        self._note(place, None)

    def drop(self, episodes: Sequence[EpisodeId]) -> None:
        """Forget the episodes of a group that is given up or starts again, and what was recorded of it."""
        for place in episodes:
            self.stop(place)
        for number in {place.group for place in episodes}:
            self.forget(number)

    def over(self, groups: Sequence[Group]) -> None:
        """Forget groups that the queue has deleted."""
        for group in groups:
            self.forget(group.number)

    def forget(self, number: int) -> None:
        """Forget all of a group."""
        if (group := self._groups.pop(number, None)) is not None:
            for key in group.keys:
                del self._frames[key]
        self._forget_episodes(number)

    async def retain(self, needed: Mapping[int, int]) -> None:
        """Let go of payloads that neither a record names nor this worker holds. Raises StorageError.

        Args:
            needed: position of the oldest payload that a record names, by number of the worker.
        """
        if self._kept is not None:
            held = [group.place.position for group in self._groups.values() if group.place is not None]
            below = min((*held, *self._writing), default=self._kept.payloads.end)  # those that are written have no place yet
            await asyncio.to_thread(self._kept.payloads.forget, min(needed.get(self._number, below), below))

    def _forget_episodes(self, number: int) -> None:
        self._ended.pop(number, None)
        if self._kept is not None:
            self._kept.turns.over(number)

    def _note(self, place: EpisodeId, outcome: Sequence[Trajectory] | TrajectoryRejected | None) -> None:
        left = None if self._notes is None else self._notes.ended(place, outcome)
        if left is not None:
            self.sampled(place, left)


def worker_of(config: Config, loaded: RolloutParts, pool: Pool, recording: Recording, number: int, kept: WorkerLog | None) -> Worker:
    """Return a worker whose episodes sample from the engines of `pool`."""
    notes, turns = EpisodeNotes(choice_of(config)), None if kept is None else kept.turns
    stage = parts.context_of(config, loaded, pool, recording)
    stage = replace(stage, opened=notes.opened, turns=turns, piece=0 if turns is None else config.log.piece_tokens)
    size = config.rollout.group_size
    return Worker(lambda prompt, place: episode.run(stage, prompt, place), size, recording, kept, number, notes)
