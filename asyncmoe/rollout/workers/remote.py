"""A rollout worker as the controller sees it: episodes that run there, and what it says of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asyncmoe.errors import AsyncmoeError, InvariantBroken, TrajectoryRejected, WaitTimeout
from asyncmoe.log.turns import EpisodeKey
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.flights import LOST
from asyncmoe.rollout.sampled_episodes import from_bytes
from asyncmoe.rollout.tasks.types import Prompt, to_bytes
from asyncmoe.rollout.workers.worker import Sampled
from asyncmoe.rpc.async_client import AsyncClient
from asyncmoe.rpc.messages import Reply, Request
from asyncmoe.rpc.worker_messages import (
    EngineUse,
    Made,
    WorkerAsk,
    WorkerBegin,
    WorkerBegun,
    WorkerEngines,
    WorkerForget,
    WorkerJoin,
    WorkerNews,
    WorkerPack,
    WorkerPacked,
    WorkerRan,
    WorkerRun,
    WorkerShow,
    WorkerShown,
)

_ANSWER_S, _READ_S, _EPISODE_S = 30.0, 600.0, 7 * 86_400.0
"""What a worker loads, reads or writes may be large; what an episode may take, its own limits say."""


class RemoteWorker:
    """One worker. For the controller's event loop.

    Args:
        lost: called once, when the worker is gone.
        sampled: called with what an episode leaves for readers of samples.

    Attributes:
        joined: how it joined.
        gone: why it is lost; empty: it is not.
        engines: what it was told last.
        uses: what it said of the engines, by their serial numbers.
        requests: at engines or waiting for one.
        prompts: encoded prompts of the groups that it runs or holds, by number.
        running: number of episodes that run there.
        ended: the episodes that have ended there and are not yet part of a group.
    """

    def __init__(self, joined: WorkerJoin, lost: Callable[[RemoteWorker], None], sampled: Sampled) -> None:
        self.joined, self.gone, self._lost, self._sampled = joined, "", lost, sampled
        self.name = f"rollout worker {joined.number}"
        self.engines: WorkerEngines | None = None
        self.uses: dict[int, EngineUse] = {}
        self.prompts: dict[int, bytes] = {}
        self.requests = self.running = 0
        self.ended: set[EpisodeId] = set()
        self._client = AsyncClient(joined.rendezvous, self.name)
        self._told: set[asyncio.Task[None]] = set()

    async def begin(self, first: WorkerBegin) -> Sequence[int]:
        """Send the first message; return the groups of which it has recorded answers."""
        begun = await self.ask(first, _READ_S)
        assert isinstance(begun, WorkerBegun)
        return begun.groups

    async def episode(self, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of training.

        Raises:
            TrajectoryRejected: as `asyncmoe.rollout.episodes.episode.run`, or `LOST`.
            AsyncmoeError: the run cannot go on.
        """
        if place.group not in self.prompts:
            self.prompts[place.group] = to_bytes(prompt)
        try:
            made = await self._run(WorkerRun(_told(place), self.prompts[place.group]), place)
        except asyncio.CancelledError:
            self.forget([place])
            raise
        self.ended.add(place)
        return made

    async def evaluate(self, name: str, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of an evaluation set. Raises as `episode`."""
        return await self._run(WorkerRun(_told(place), to_bytes(prompt), name), place)

    async def _run(self, request: WorkerRun, place: EpisodeId) -> Sequence[Made]:
        self.running += 1
        try:
            ran = await self._ask(request, _EPISODE_S)
        finally:
            self.running -= 1
        assert isinstance(ran, WorkerRan)
        if ran.sampled:
            self._sampled(place, from_bytes(ran.sampled))
        if ran.reason:
            raise TrajectoryRejected(ran.reason, ran.detail)
        return ran.made

    async def show(self, first: int, count: int) -> Sequence[Group]:
        """Have the worker make demonstrations; return a group of one for each trajectory.

        Raises:
            TrajectoryRejected: one is unfit for training, or `LOST`.
            AsyncmoeError: the run cannot go on.
        """
        shown = await self._ask(WorkerShow(first, count), _EPISODE_S)
        assert isinstance(shown, WorkerShown)
        return [Group(0, (item,), {}, 0, place) for item, place in zip(shown.items, shown.places, strict=True)]

    def forget(self, episodes: Sequence[EpisodeId] = (), groups: Sequence[int] = ()) -> None:
        """Have the worker end and forget episodes, one that runs is rejected as `LOST`; and forget groups."""
        self.ended.difference_update(episodes)
        for group in groups:
            self.prompts.pop(group, None)
        self.tell(WorkerForget(tuple(map(_told, episodes)), tuple(groups)))

    async def pack(self, episodes: Sequence[EpisodeId], newest: int) -> Group:
        """Have the worker make a group of episodes that have ended there, and return it without its frames.

        Raises:
            TrajectoryRejected: it is unfit for training, or `LOST`.
            StorageError: the log cannot be written.
        """
        packed = await self._ask(WorkerPack(tuple(map(_told, episodes)), newest), _READ_S)
        assert isinstance(packed, WorkerPacked)
        self.ended.difference_update(episodes)
        group = episodes[0].group
        if any(item.group != group for item in packed.items):
            raise InvariantBroken(f"{self.name} packed other trajectories than those of group {group}")
        return Group(0, packed.items, {}, packed.attempt, packed.place)

    async def news(self, request: WorkerAsk | WorkerEngines, timeout_s: float = _ANSWER_S) -> WorkerNews:
        """Return what the worker says of itself and its engines, once it does what it was told of these."""
        news = await self.ask(request, timeout_s)
        assert isinstance(news, WorkerNews)
        return news

    async def ask(self, request: Request, timeout_s: float = _ANSWER_S) -> Reply:
        """Return the worker's reply. Raises as `AsyncClient.ask`."""
        return (await self._client.ask(request, timeout_s))[0]

    def tell(self, request: Request) -> None:
        """Send a request without waiting; a worker that is lost needs not hear it."""
        if self.gone:
            return
        task = asyncio.create_task(self._quietly(request))
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    def lose(self, why: str) -> None:
        """Note that the worker is gone, and tell all who wait for it."""
        if self.gone:
            return
        self.gone = why
        self._lost(self)
        self._client.close()

    async def close(self) -> None:
        """Close the connection."""
        self._client.close()
        await asyncio.gather(*self._told, return_exceptions=True)

    async def _ask(self, request: Request, timeout_s: float) -> Reply:
        """As `ask`; raises TrajectoryRejected if the worker is lost."""
        try:
            if not self.gone:
                return await self.ask(request, timeout_s)
        except WaitTimeout as error:  # the connection is lost, or nobody answers
            self.lose(str(error))
        raise TrajectoryRejected(LOST, self.gone)

    async def _quietly(self, request: Request) -> None:
        try:
            await self.ask(request)
        except AsyncmoeError as error:
            self.lose(str(error))


def _told(place: EpisodeId) -> EpisodeKey:
    return EpisodeKey(place.group, place.episode, place.attempt)
