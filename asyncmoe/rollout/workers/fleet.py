"""The rollout workers of a run, as the controller sees them: they join, run groups, are lost, and return.

All episodes of a group go to the worker that got its first one, because a group is one payload. A worker that does not answer is lost:
its replacement continues the unfinished groups from recorded answers, and reads the finished ones from the log. The run ends if no
replacement joins in time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from asyncmoe.config import Config
from asyncmoe.engines.liveness import PAUSE_SHARE
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import AsyncmoeError, ProtocolError, TrajectoryRejected, WaitTimeout
from asyncmoe.log.turns import EpisodeId
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rollout.sampled_episodes import SampledEpisode, from_bytes
from asyncmoe.rollout.tasks.types import Prompt, to_bytes
from asyncmoe.rollout.workers.gates import WorkerGates
from asyncmoe.rollout.workers.remote import RemoteWorker
from asyncmoe.rpc.messages import Done, FindWorker, WorkerFound
from asyncmoe.rpc.peers import check, check_digest, facts
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.worker_messages import (
    LOST,
    Figures,
    Made,
    WorkerBegin,
    WorkerBegun,
    WorkerForget,
    WorkerJoin,
    WorkerNews,
    WorkerPack,
    WorkerRan,
    WorkerRun,
    WorkerShow,
)

T = TypeVar("T")
log = logging.getLogger(__name__)
_LOOK_S = 0.05
_READ_S, _EPISODE_S = 600.0, 7 * 86_400.0
"""Generous limits: a worker may load, read or write much, and an episode has limits of its own."""


class WorkerFleet:
    """All rollout workers of a run; an `asyncmoe.rollout.producer.Workers`. For the controller's event loop.

    Attributes:
        sampled: called with an episode's records for readers of samples.
        times_lost: how often a worker was lost.

    Args:
        pool: the run's engines, which the workers use.
        generated: called as `asyncmoe.rollout.recorder.Recorder.generated`.
        first: returns the first message to a worker that joins now.
        untried: the scorer and the reference answers have not been tried yet.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        generated: Callable[[str, float, float], None],
        first: Callable[[], WorkerBegin],
        untried: bool = False,
    ) -> None:
        self._config, self._pool, self._generated, self._first, self._untried = config, pool, generated, first, untried
        self._workers: dict[int, RemoteWorker] = {}
        self._groups: dict[int, tuple[int, bytes]] = {}
        """By group: the number of its worker, and its encoded prompt."""
        self._refused: AsyncmoeError | None = None
        self._figures: dict[Rendezvous, Figures] = {}
        """Statistics of all workers, lost ones included."""
        self._recorded: dict[int, int] = {}
        self.sampled: Callable[[EpisodeId, SampledEpisode], None] = lambda place, left: None
        self.times_lost = 0
        self._gates = pool.elsewhere = WorkerGates(pool, self._alive, config.engines.hang_timeout_s * PAUSE_SHARE)

    # ------------------------------------------------------------ workers

    async def join(self, request: WorkerJoin) -> Done:
        """Admit a worker.

        Raises:
            ConfigError: it has another configuration.
            UserError: its packages or its clock differ from the controller's.
            ProtocolError: another worker has its number.
            AsyncmoeError: it cannot load what episodes need, or open its log.
        """
        config = self._config
        check_digest("a rollout worker", request.config_digest, config.digest)
        check(facts("controller"), request.facts)
        before = self._workers.get(request.number)
        if before is not None and not before.gone:
            raise ProtocolError(f"rollout worker {request.number} has joined already")
        worker = RemoteWorker(request, self._lost, self._take)
        untried = self._untried and request.number == 1
        try:
            begun = await worker.ask(msgspec.structs.replace(self._first(), first=untried), WorkerBegun, _READ_S)
        except BaseException as error:
            if untried and isinstance(error, AsyncmoeError) and not isinstance(error, WaitTimeout):
                self._refused = error
            worker.close()
            raise
        self._untried = self._untried and not untried
        self._recorded |= dict.fromkeys(begun.groups, request.number)
        self._workers[request.number] = worker
        worker.follow()
        log.info("%s has joined, process %d on %s", worker.name, request.rendezvous.pid, request.rendezvous.host)
        return Done()

    async def find(self, request: FindWorker) -> WorkerFound:
        """Return the worker that has a log writer's payloads: the one of that number, or another if the run now has fewer workers."""
        number = (request.writer - 1) % self._config.rollout.workers + 1
        with suppress(TimeoutError):
            async with asyncio.timeout(request.wait_s):
                return WorkerFound((await self._serving(number)).joined.rendezvous)
        return WorkerFound()

    def lost(self) -> set[tuple[str, int]]:
        """Return host and process id of each worker that is lost and not replaced: it may still run, and hang."""
        return {(one.joined.rendezvous.host, one.joined.rendezvous.pid) for one in self._workers.values() if one.gone}

    def figures(self) -> Figures:
        """Return the statistics of all workers, including lost ones."""
        return added(self._figures.values())

    async def run(self) -> None:
        """Follow the engines of the pool, and the workers; never returns.

        Raises:
            AsyncmoeError: a worker has not joined or returned in time; or the first one cannot load what episodes need.
        """
        numbers, limit = range(1, self._config.rollout.workers + 1), self._config.engines.start_timeout_s
        seen = dict.fromkeys(numbers, time.monotonic())
        while self._refused is None:
            self._gates.tell()
            seen |= {worker.joined.number: time.monotonic() for worker in self._alive()}
            for number in numbers:
                if time.monotonic() - seen[number] > limit:
                    why = self._workers[number].gone if number in self._workers else "none has joined"
                    raise AsyncmoeError(f"rollout worker {number} is missing for {limit:g} s (engines.start_timeout_s): {why}")
            await asyncio.sleep(_LOOK_S)
        raise self._refused

    async def close(self) -> None:
        """Tell all workers that the run is over."""
        await asyncio.gather(*(worker.end() for worker in self._workers.values()))

    # ------------------------------------------------------------ groups, for the producer

    async def episode(self, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of training on the worker of its group.

        Raises:
            TrajectoryRejected: as `asyncmoe.rollout.episodes.episode.run`.
            AsyncmoeError: the run cannot go on.
        """
        if place.group not in self._groups:
            least, before = await self._serving(), self._recorded.pop(place.group, 0)
            self._groups.setdefault(place.group, (before or least.joined.number, to_bytes(prompt)))  # unless another member has done so
        number, asked = self._groups[place.group]
        return await self._on(number, lambda worker: self._train(worker, asked, place))

    async def evaluate(self, name: str, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of an evaluation set. Raises as `episode`, and TrajectoryRejected (`LOST`): its worker is lost."""
        return await self._run(await self._serving(), WorkerRun(place, to_bytes(prompt), name))

    async def show(self, first: int, count: int) -> Sequence[Group]:
        """Make demonstrations. Raises as `episode`."""
        return await self._on(None, lambda worker: worker.pack(WorkerShow(first, count), _EPISODE_S))

    async def pack(self, episodes: Sequence[EpisodeId], newest: int) -> Group:
        """Assemble a group from its episodes. An episode runs again if the group's worker has not seen it end.

        Raises:
            TrajectoryRejected: the group is unfit for training, or as `episode` raises.
            StorageError: the log cannot be written.
        """
        number, asked = self._groups[episodes[0].group]

        async def packed(worker: RemoteWorker) -> Group:
            await asyncio.gather(*(self._train(worker, asked, place) for place in episodes if place not in worker.ended))
            (group,) = await worker.pack(WorkerPack(tuple(episodes), newest), _READ_S)
            worker.ended.difference_update(episodes)
            return group

        return await self._on(number, packed)

    def forget(self, groups: Sequence[int], episodes: Sequence[EpisodeId] = ()) -> None:
        """End these episodes, and make the worker of each group forget the group, including what was recorded."""
        for group in groups:
            if (known := self._groups.pop(group, None)) is not None:
                self._workers[known[0]].forget([group], episodes)

    def retain(self, needed: Mapping[int, int]) -> None:
        """Free payloads that no record references. `needed`: by worker number, the position of the oldest referenced payload."""
        for worker in self._alive():
            worker.tell(WorkerForget(needed=dict(needed)))

    # ------------------------------------------------------------ internals

    async def _on(self, number: int | None, ask: Callable[[RemoteWorker], Awaitable[T]]) -> T:
        """Ask a worker; if it is lost meanwhile, ask its replacement, which continues from the recorded answers."""
        while True:
            worker = await self._serving(number)
            try:
                return await ask(worker)
            except TrajectoryRejected as rejected:
                if rejected.reason != LOST:
                    raise
                await asyncio.sleep(_LOOK_S)  # a worker that is ending rejects with LOST while still connected

    async def _serving(self, number: int | None = None) -> RemoteWorker:
        """Return the worker with this number, once there is one; None: the one with the fewest episodes, once all have joined."""
        while True:
            alive = [worker for worker in self._alive() if number in (None, worker.joined.number)]
            if alive and (number is not None or len(self._workers) == self._config.rollout.workers):
                return min(alive, key=lambda one: (one.running, one.joined.number))
            await asyncio.sleep(_LOOK_S)

    async def _train(self, worker: RemoteWorker, asked: bytes, place: EpisodeId) -> Sequence[Made]:
        try:
            made = await self._run(worker, WorkerRun(place, asked))
        except asyncio.CancelledError:
            worker.forget([], [place])
            raise
        worker.ended.add(place)
        return made

    async def _run(self, worker: RemoteWorker, request: WorkerRun) -> Sequence[Made]:
        worker.running += 1
        try:
            ran = await worker.do(request, WorkerRan, _EPISODE_S)
        finally:
            worker.running -= 1
        if ran.sampled:
            self.sampled(request.episode, from_bytes(ran.sampled))
        if ran.reason:
            raise TrajectoryRejected(ran.reason, ran.detail)
        return ran.made

    def _alive(self) -> list[RemoteWorker]:
        return [worker for worker in self._workers.values() if not worker.gone]

    def _take(self, worker: RemoteWorker, news: WorkerNews) -> None:
        self._figures[worker.joined.rendezvous] = news.figures
        for busy in news.busy:
            self._generated(*busy)
        for name, count in news.tokens.items():
            setattr(self._pool, name, getattr(self._pool, name) + count)
        self._gates.note(worker, news.uses)

    def _lost(self, worker: RemoteWorker) -> None:
        log.error("%s is lost: %s", worker.name, worker.gone)
        self.times_lost += 1
        self._gates.count()


def added(several: Iterable[Figures]) -> Figures:
    """Return the sum of several workers' figures."""
    total = dict[str, Any]()
    for one in several:
        _add(total, msgspec.to_builtins(one))
    return msgspec.convert(total, Figures)


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping):
            _add(total.setdefault(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value
