"""Run episodes, assemble them into groups, and hold the groups until they are over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from asyncmoe.config import Config
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.log.log import Place
from asyncmoe.log.turns import EpisodeId
from asyncmoe.queue import payload
from asyncmoe.queue.group_buffer import Group, pack, whole
from asyncmoe.rollout import evaluation, parts
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.run_log import WorkerLog
from asyncmoe.rollout.sampled_episodes import EpisodeNotes, SampledEpisode
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rpc.worker_messages import Made
from asyncmoe.telemetry.samples.choice import choice_of
from asyncmoe.trajectory import NOTHING, Buffer, Recording, Trajectory, part, validate

Play = Callable[[Prompt, EpisodeId], Awaitable[tuple[Trajectory, ...]]]
Show = Callable[[int], Awaitable[Sequence[Trajectory]]]
_LONG = 1 << 17
"""Tokens above which a group is checked and encoded in a thread: for smaller ones the thread costs more than it saves the event loop."""


class Worker:
    """The work of one rollout worker, apart from its process. For one event loop.

    Args:
        play: runs and scores one episode of training; raises TrajectoryRejected.
        group_size: number of episodes in a group.
        recording: data that each trajectory must carry.
        kept: where payloads and answers are kept; None: nowhere.
        number: number of the worker, and so of its logs.
        notes: records the episodes that are kept for readers.
        evaluated: like `play`, for each evaluation set by name.
        shown: returns a demonstration of the warm-up by number.

    Attributes:
        left: records of episodes for readers of samples, until taken.
    """

    def __init__(
        self,
        play: Play,
        group_size: int,
        recording: Recording = NOTHING,
        kept: WorkerLog | None = None,
        number: int = 1,
        notes: EpisodeNotes | None = None,
        evaluated: Mapping[str, Play] | None = None,
        shown: Show | None = None,
    ) -> None:
        self._play, self._size, self._recording, self._kept, self._number = play, group_size, recording, kept, number
        self._notes, self._evaluated, self._shown = notes, evaluated or {}, shown
        self.left: dict[EpisodeId, SampledEpisode] = {}
        self._running: dict[EpisodeId, asyncio.Task[Any] | None] = {}
        self._ended: dict[int, dict[EpisodeId, tuple[Trajectory, ...]]] = {}
        """By the number of the group."""
        self._groups: dict[int, Group] = {}
        self._frames: dict[str, list[Buffer]] = {}
        self._writing: list[int] = []
        self._newest_shown: list[int] = []
        """Log positions of demonstrations that the queue may not know yet."""

    async def episode(self, prompt: Prompt, place: EpisodeId) -> tuple[Made, ...]:
        """Run and score one episode, in a task of its own, which `forget` cancels; keep its trajectories for `pack`. Raises as `play`."""
        mine = self._running[place] = asyncio.current_task()
        try:
            made = await self._play(prompt, place)
            self._note(place, made)
            if self._running.get(place) is mine:  # else it was forgotten meanwhile
                self._ended.setdefault(place.group, {})[place] = made
            return tuple(Made(one.agent, one.reward) for one in made)
        except TrajectoryRejected as rejected:
            self._note(place, rejected)
            raise
        finally:
            if self._running.get(place) is mine:
                self._note(place, None)  # if it was cancelled
                del self._running[place]

    async def evaluate(self, name: str, prompt: Prompt, place: EpisodeId) -> tuple[Made, ...]:
        """Run and score one episode of an evaluation set; keep nothing. Raises as `play`."""
        return tuple(map(summed_up, await self._evaluated[name](prompt, place)))

    async def show(self, first: int, count: int) -> list[Group]:
        """Make demonstrations, and return a group for each trajectory, once the groups' payloads are in the log.

        Raises:
            DataError: see `asyncmoe.rollout.demonstrations.Demonstrations`.
            TrajectoryRejected: one is unfit for training.
            StorageError: the log cannot be written.
        """
        assert self._shown is not None
        made = [one for index in range(first, first + count) for one in await self._shown(index)]
        for one in made:
            validate(one, self._recording)
        packed = [pack([one]) for one in made]
        if self._kept is None:
            return [group for group, _ in packed]
        places = await asyncio.gather(*(payload.write(self._kept.payloads, *one, self._writing) for one in packed))
        self._newest_shown = places
        return [replace(group, place=Place(self._number, at)) for (group, _), at in zip(packed, places, strict=True)]

    async def pack(self, episodes: Sequence[EpisodeId], newest: int) -> Group:
        """Assemble a group from episodes that have ended; return once its payload is in the log.

        Raises:
            ProtocolError: one of them has not ended here.
            TrajectoryRejected: the group is unfit for training.
            StorageError: the log cannot be written.
        """
        ended = self._ended.get(episodes[0].group, {})
        if missing := [place.key() for place in episodes if place not in ended]:
            raise ProtocolError(f"pack: got {missing[0]}, expected only episodes that have ended here")
        group = await self.hold([one for place in episodes for one in ended[place]], newest)
        self._forget_episodes(group.number)
        return group

    async def hold(self, trajectories: Sequence[Trajectory], newest: int) -> Group:
        """Check, write and hold a group. Raises as `pack`."""
        made = partial(whole, trajectories, self._size, self._recording, newest)
        group, frames = await asyncio.to_thread(made) if sum(map(len, trajectories)) > _LONG else made()
        if self._kept is not None:
            position = await payload.write(self._kept.payloads, group, frames, self._writing)
            group = replace(group, place=Place(self._number, position))
        self._groups[group.number] = group
        self._frames.update(frames)
        return group

    async def fetch(self, places: Mapping[str, Place], layers: Sequence[int] | None = None, masks: bool = True) -> list[Buffer]:
        """Return encoded frames (`asyncmoe.trajectory.encode`) of trajectories, in the order of `places`. Groups that only an earlier
        worker held are read from the log.

        Args:
            places: by the trajectory's key, the place of its group in the log.
            layers, masks: see `asyncmoe.trajectory.part`.

        Raises:
            ProtocolError: a trajectory is not at its place, or lacks the routes of one of `layers`.
            DataError: the log has no group there.
        """
        frames = {key: self._frames[key] for key in places if key in self._frames}
        for place in {place for key, place in places.items() if key not in frames}:
            frames |= await asyncio.to_thread(self._read, place)
        if unknown := [key for key in places if key not in frames]:
            raise ProtocolError(f"fetch: rollout worker {self._number} does not hold {unknown[0]}")
        return [frame for key in places for frame in part(frames[key], layers, masks)]

    def _read(self, place: Place) -> Mapping[str, list[Buffer]]:
        if self._kept is None:
            return {}
        data = self._kept.payloads.read_at(place.position, str(place.writer))
        return payload.decode(data, 0, place)[1]

    def forget(self, groups: Sequence[int], episodes: Sequence[EpisodeId] = ()) -> None:
        """End and forget episodes at once, running or ended: a group's next attempt may have episodes of the same name. Also forget whole
        groups, including what was recorded of them."""
        for place in episodes:
            if (task := self._running.pop(place, None)) is not None:
                task.cancel()
            self._ended.get(place.group, {}).pop(place, None)
            self._note(place, None)
            self.left.pop(place, None)
        for number in groups:
            if (group := self._groups.pop(number, None)) is not None:
                for key in group.keys:
                    del self._frames[key]
            self._forget_episodes(number)

    async def retain(self, needed: Mapping[int, int]) -> None:
        """Free payloads that no record references and this worker does not hold. Raises StorageError.

        Args:
            needed: by worker number, the position of the oldest payload that a record references.
        """
        if self._kept is not None:
            held = [group.place.position for group in self._groups.values() if group.place is not None]
            below = min((*held, *self._writing, *self._newest_shown), default=self._kept.payloads.end)  # pending writes have no place yet
            await asyncio.to_thread(self._kept.payloads.forget, min(needed.get(self._number, below), below))

    def _forget_episodes(self, number: int) -> None:
        self._ended.pop(number, None)
        if self._kept is not None:
            self._kept.turns.over(number)

    def _note(self, place: EpisodeId, outcome: Sequence[Trajectory] | TrajectoryRejected | None) -> None:
        if self._notes is not None and (left := self._notes.ended(place, outcome)) is not None:
            self.left[place] = left


def summed_up(trajectory: Trajectory) -> Made:
    """Return the summary of a trajectory that an evaluation needs."""
    sampled, newest = int(trajectory.loss_mask.sum()), int(trajectory.versions.max())
    cut, metrics = trajectory.finish == "length", trajectory.metrics
    return Made(trajectory.agent, float(trajectory.reward), sampled, trajectory.oldest_version, newest, cut, metrics)


def worker_of(config: Config, loaded: RolloutParts, pool: Pool, recording: Recording, number: int, kept: WorkerLog | None = None) -> Worker:
    """Return a worker whose episodes sample from the engines of `pool`. `kept`: as in `Worker`."""
    notes, stage = EpisodeNotes(choice_of(config)), parts.context_of(config, loaded, pool, recording)
    training = replace(stage, opened=notes.opened, turns=kept.turns if kept is not None else None, piece=config.log.piece_tokens)
    sets = {name: evaluation.stage_of(stage, name, section) for name, section in config.evaluation.every_set.items()}
    return Worker(
        partial(episode.run, training),
        config.rollout.group_size,
        recording,
        kept,
        number,
        notes,
        {name: partial(episode.run, one) for name, one in sets.items()},
        parts.demonstrations_of(config, loaded),
    )
