"""A rollout worker as the controller sees it: episodes that run there, and what it says of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncmoe.errors import AsyncmoeError, InvariantBroken, TrajectoryRejected, WaitTimeout
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.sampled_episodes import SampledEpisode, from_bytes
from asyncmoe.rollout.tasks.types import Prompt, to_bytes
from asyncmoe.rollout.workers.outcome import LOST, RUN_FAILED, RemoteTrajectory
from asyncmoe.rpc.async_client import AsyncClient
from asyncmoe.rpc.messages import Request
from asyncmoe.rpc.worker_messages import (
    EngineUse,
    EpisodeMember,
    EpisodeOutcome,
    WorkerAsk,
    WorkerBegin,
    WorkerBegun,
    WorkerEngines,
    WorkerJoin,
    WorkerLoad,
    WorkerNews,
    WorkerOver,
    WorkerPack,
    WorkerPacked,
    WorkerStart,
    WorkerStop,
)

_BEGIN_S, _ANSWER_S, _PACK_S = 300.0, 30.0, 300.0


Sampled = Callable[[EpisodeId, SampledEpisode], None]
Told = tuple[RemoteTrajectory, ...]


@dataclass
class _Starting:
    prompt: bytes
    members: list[EpisodeMember] = field(default_factory=list)


class RemoteWorker:
    """One worker. For the controller's event loop.

    Args:
        lost: called once, when the worker is gone.
        sampled: called with what an episode leaves for readers of samples.

    Attributes:
        joined: how it joined.
        gone: why it is lost; empty: it is not.
        engines: what it was told last.
        groups: numbers of the groups that it runs or holds.
    """

    def __init__(self, joined: WorkerJoin, lost: Callable[[RemoteWorker], None], sampled: Sampled) -> None:
        self.joined, self.gone, self._lost, self._sampled = joined, "", lost, sampled
        self.name = f"rollout worker {joined.number}"
        self.engines: WorkerEngines | None = None
        self.groups: set[int] = set()
        self._client = AsyncClient(joined.rendezvous, self.name)
        self._running: dict[EpisodeId, asyncio.Future[Told]] = {}
        self._starting: dict[int, _Starting] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._told: set[asyncio.Task[None]] = set()

    @property
    def width(self) -> int:
        """Number of its engines that serve."""
        return 0 if self.engines is None else sum(not (one.waiting or one.leaving) for one in self.engines.engines)

    async def begin(self, first: WorkerBegin) -> Sequence[int]:
        """Send the first message; return the groups of which it has recorded answers."""
        begun, _ = await self._client.ask(first, _BEGIN_S)
        assert isinstance(begun, WorkerBegun)
        return begun.groups

    @property
    def running(self) -> int:
        """Number of episodes that run there."""
        return len(self._running)

    async def episode(self, prompt: Prompt, place: EpisodeId) -> Told:
        """Run and score one episode.

        Raises:
            TrajectoryRejected: as `asyncmoe.rollout.episodes.episode.run`, or `LOST`.
            AsyncmoeError: the run cannot go on.
        """
        self.check()
        ended: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._running[place] = ended
        starting = self._starting.get(place.group) or self._starting.setdefault(place.group, _Starting(to_bytes(prompt)))
        starting.members.append(EpisodeMember(place.episode, place.attempt))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())
        try:
            return await ended
        except asyncio.CancelledError:
            if self._running.get(place) is ended:
                self.drop([place])
            raise
        finally:
            if self._running.get(place) is ended:
                del self._running[place]

    def drop(self, places: Sequence[EpisodeId]) -> None:
        """Have the worker end and forget episodes of one group."""
        for place in places:
            self._running.pop(place, None)
            if (starting := self._starting.get(place.group)) is not None:
                starting.members = [one for one in starting.members if one != EpisodeMember(place.episode, place.attempt)]
        self.tell(WorkerStop(places[0].group, tuple(EpisodeMember(place.episode, place.attempt) for place in places)))

    async def pack(self, group: int, episodes: Sequence[EpisodeId], newest: int) -> Group:
        """Have the worker make a group of episodes that have ended there, and return it without its frames.

        Raises:
            TrajectoryRejected: it is unfit for training, or `LOST`.
            StorageError: the log cannot be written.
        """
        self.check()
        members = tuple(EpisodeMember(place.episode, place.attempt) for place in episodes)
        try:
            packed, _ = await self._client.ask(WorkerPack(group, members, newest), _PACK_S)
        except WaitTimeout as error:  # the connection is lost, or nobody answers
            self.lose(str(error))
            raise TrajectoryRejected(LOST, self.gone) from error
        assert isinstance(packed, WorkerPacked)
        if any(item.group != group or item.holder != self.joined.number for item in packed.items):
            raise InvariantBroken(f"{self.name} packed other trajectories than those of group {group}")
        return Group(0, packed.items, {}, packed.attempt, packed.place)

    def abandon(self, why: str) -> None:
        """Reject all episodes that run there, so that their groups start again elsewhere."""
        for waiting in list(self._running.values()):
            if not waiting.done():
                waiting.set_exception(TrajectoryRejected(LOST, why))

    def over(self, group: int) -> None:
        """Have the worker forget a group."""
        self.groups.discard(group)
        self.tell(WorkerOver((group,)))

    async def use(self, engines: WorkerEngines, timeout_s: float) -> Sequence[EngineUse]:
        """Have the worker use these engines, with its gate open or closed; return what it knows of them once that is so."""
        load, _ = await self._client.ask(engines, timeout_s)
        assert isinstance(load, WorkerLoad)
        return load.uses

    async def news(self, seen: int, wait_s: float) -> WorkerNews:
        """Return what has happened since number `seen`, and tell those who wait for it."""
        news, _ = await self._client.ask(WorkerAsk(seen, wait_s), wait_s + _ANSWER_S)
        assert isinstance(news, WorkerNews)
        for ended in news.ended:
            place = EpisodeId(ended.group, ended.episode, ended.attempt)
            if (waiting := self._running.get(place)) is not None and not waiting.done():
                if ended.sampled:
                    self._sampled(place, from_bytes(ended.sampled))
                _end(waiting, ended)
        return news

    async def ask(self, request: Request) -> None:
        """Send a request whose reply has no content."""
        await self._client.ask(request, _ANSWER_S)

    def tell(self, request: Request) -> None:
        """Send a request without waiting; a worker that is lost needs not hear it."""
        if self.gone:
            return
        task = asyncio.create_task(self._quietly(request))
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    def check(self) -> None:
        """Raise TrajectoryRejected if the worker is lost."""
        if self.gone:
            raise TrajectoryRejected(LOST, self.gone)

    def lose(self, why: str) -> None:
        """Note that the worker is gone, and tell all who wait for it."""
        if self.gone:
            return
        self.gone = why
        self._lost(self)
        for waiting in self._running.values():
            if not waiting.done():
                waiting.set_exception(TrajectoryRejected(LOST, self.gone))

    async def close(self) -> None:
        """Close the connection."""
        tasks = [*self._told, *([] if self._flushing is None else [self._flushing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._client.close()

    async def _flush(self) -> None:
        """Send the starts of this turn of the event loop, those of a group in one message."""
        await asyncio.sleep(0)
        while self._starting:
            group, starting = self._starting.popitem()
            if not starting.members:
                continue
            await self._quietly(WorkerStart(group, starting.prompt, tuple(starting.members)))

    async def _quietly(self, request: Request) -> None:
        try:
            await self._client.ask(request, _ANSWER_S)
        except AsyncmoeError as error:
            self.lose(str(error))


def _end(waiting: asyncio.Future[Told], ended: EpisodeOutcome) -> None:
    if ended.reason == RUN_FAILED:
        waiting.set_exception(AsyncmoeError(ended.detail))
    elif ended.reason:
        waiting.set_exception(TrajectoryRejected(ended.reason, ended.detail))
    else:
        waiting.set_result(tuple(RemoteTrajectory(ended.group, ended.episode, ended.attempt, *one) for one in ended.rewards))
