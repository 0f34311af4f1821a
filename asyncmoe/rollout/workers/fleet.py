"""The rollout workers of a run, as the controller has them: they join, run groups, are lost, and come again.

A group belongs to the number of the worker that its first episode was given to, because it is one payload. A worker that does not answer is
lost: the one that takes its place goes on with its unfinished groups from the answers that were recorded, and reads its finished ones from
the log. The run ends if none comes in time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from asyncmoe.config import Config
from asyncmoe.engines import backend
from asyncmoe.engines.engine import Engine
from asyncmoe.engines.liveness import PAUSE_SHARE
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import AsyncmoeError, ConfigError, ProtocolError, TrajectoryRejected, WaitTimeout
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.flights import LOST
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.workers import figures
from asyncmoe.rollout.workers.figures import Figures, added
from asyncmoe.rollout.workers.gates import WorkerGates
from asyncmoe.rollout.workers.remote import RemoteWorker
from asyncmoe.rollout.workers.worker import Sampled
from asyncmoe.rpc.messages import Done, FindWorker, WorkerFound
from asyncmoe.rpc.peers import check, facts
from asyncmoe.rpc.worker_messages import Made, WorkerAsk, WorkerBegin, WorkerEnd, WorkerJoin, WorkerNews, WorkerRetain

T = TypeVar("T")
log = logging.getLogger(__name__)
_LOOK_S = 0.05


class WorkerFleet:
    """All rollout workers of a run; an `asyncmoe.rollout.flights.Workers`. For the controller's event loop.

    Attributes:
        sampled: called with what an episode leaves for readers of samples.
        times_lost: how often a worker was lost.

    Args:
        pool: the run's engines, which the workers use.
        generated: called as `asyncmoe.rollout.recorder.Recorder.generated`.
        first: returns what a worker that joins now is told first.
        untried: whether nobody has tried yet if the scorer and the answers can be used.
        address_of: as `asyncmoe.engines.backend.address_of`.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        generated: Callable[[str, float, float], None],
        first: Callable[[], WorkerBegin],
        untried: bool = False,
        address_of: Callable[[Engine], tuple[str, str]] = backend.address_of,
    ) -> None:
        self._config, self._pool, self._generated, self._first, self._untried = config, pool, generated, first, untried
        self._workers: dict[int, RemoteWorker] = {}
        self._following: dict[int, asyncio.Task[None]] = {}
        self._groups: dict[int, tuple[int, Prompt]] = {}
        """The number of the worker of each group, and what it asks."""
        self._refused: AsyncmoeError | None = None
        self._figures: dict[int, Figures] = {}
        self._ended_figures = Figures()
        self._recorded: dict[int, int] = {}
        self.sampled: Sampled = lambda place, left: None
        self.times_lost = 0
        self._gates = pool.elsewhere = WorkerGates(pool, self._alive, self._take, config.engines.hang_timeout_s * PAUSE_SHARE, address_of)

    # ------------------------------------------------------------ workers

    async def join(self, request: WorkerJoin) -> Done:
        """Meet a worker.

        Raises:
            ConfigError: it has another configuration, or the run has no such worker.
            UserError: its packages or its clock differ from the controller's.
            ProtocolError: another worker has its number.
            AsyncmoeError: it cannot load what episodes need, or open its log.
        """
        config = self._config
        if request.number > config.rollout.workers:
            raise ConfigError("rollout worker", got=f"number {request.number}", expected=f"1 to rollout.workers = {config.rollout.workers}")
        if request.config_digest != config.digest:
            raise ConfigError("configuration of a rollout worker", got="another one", expected="the controller's")
        check(facts("controller"), request.facts, config.cluster.max_clock_skew_s)
        before = self._workers.get(request.number)
        if before is not None and not before.gone:
            raise ProtocolError(f"rollout worker {request.number} has joined already")
        worker = RemoteWorker(request, self._lost, lambda place, left: self.sampled(place, left))
        untried = self._untried and request.number == 1
        try:
            begun = await worker.begin(msgspec.structs.replace(self._first(), first=untried))
        except BaseException as error:
            if untried and isinstance(error, AsyncmoeError) and not isinstance(error, WaitTimeout):
                self._refused = error
            await worker.close()
            raise
        self._untried = self._untried and not untried
        self._recorded |= dict.fromkeys(begun, request.number)
        self._workers[request.number] = worker
        self._ended_figures = added([self._ended_figures, self._figures.pop(request.number, Figures())])
        self._following[request.number] = asyncio.create_task(self._follow(worker))
        log.info("%s has joined, process %d on %s", worker.name, request.rendezvous.pid, request.rendezvous.host)
        return Done()

    async def find(self, request: FindWorker) -> WorkerFound:
        """Say which worker has what a writer of the log wrote: the one of that number; if the run has no longer so many, another."""
        number, until = (request.writer - 1) % self._config.rollout.workers + 1, time.monotonic() + request.wait_s
        while (worker := self._workers.get(number)) is None or worker.gone:
            if time.monotonic() > until:
                return WorkerFound()
            await asyncio.sleep(_LOOK_S)
        return WorkerFound(worker.joined.rendezvous)

    def lost(self) -> set[tuple[str, int]]:
        """Return host and process id of each worker that is lost and not replaced: it may still run, and hang."""
        gone = [worker.joined.rendezvous for worker in self._workers.values() if worker.gone]
        return {(one.host, one.pid) for one in gone}

    @property
    def requests(self) -> int:
        """Requests that are at engines or wait for one."""
        return sum(worker.requests for worker in self._alive())

    def figures(self) -> Figures:
        """Return the statistics of all workers, those included that are lost."""
        return added([self._ended_figures, *self._figures.values()])

    async def run(self) -> None:
        """Follow the engines of the pool, and the workers; never returns.

        Raises:
            AsyncmoeError: a worker has not joined in time, or not come again; or the first one cannot load what episodes need.
        """
        numbers, limit = range(1, self._config.rollout.workers + 1), self._config.engines.start_timeout_s
        seen = dict.fromkeys(numbers, time.monotonic())
        while self._refused is None:
            self._gates.tell()
            seen |= {worker.joined.number: time.monotonic() for worker in self._alive()}
            for number in numbers:
                if time.monotonic() - seen[number] > limit:
                    why = self._workers[number].gone if number in self._workers else "none has joined"
                    raise AsyncmoeError(f"rollout worker {number} is missing: {why} (engines.start_timeout_s)")
            await asyncio.sleep(_LOOK_S)
        raise self._refused

    async def close(self) -> None:
        """Tell all workers that the run is over."""
        alive = self._alive()
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*self._following.values(), self._gates.close(), return_exceptions=True)
        await asyncio.gather(*(worker.ask(WorkerEnd()) for worker in alive), return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))

    # ------------------------------------------------------------ groups, for the producer

    async def episode(self, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of training on the worker of its group. Raises as `RemoteWorker.episode`, but never `LOST`."""
        if place.group not in self._groups:
            least, before = await self._some(), self._recorded.pop(place.group, 0)
            self._groups.setdefault(place.group, (before or least.joined.number, prompt))  # unless another member has chosen meanwhile
        return await self._on(self._groups[place.group][0], lambda worker: worker.episode(prompt, place))

    async def evaluate(self, name: str, prompt: Prompt, place: EpisodeId) -> Sequence[Made]:
        """Run and score one episode of an evaluation set. Raises as `RemoteWorker.evaluate`."""
        return await (await self._some()).evaluate(name, prompt, place)

    async def show(self, first: int, count: int) -> Sequence[Group]:
        """Make demonstrations, again if a worker is lost meanwhile. Raises as `RemoteWorker.show`."""
        while True:
            try:
                return await (await self._some()).show(first, count)
            except TrajectoryRejected as rejected:
                if rejected.reason != LOST:
                    raise

    async def pack(self, episodes: Sequence[EpisodeId], newest: int) -> Group:
        """Make a group of its episodes. Raises as `RemoteWorker.pack`, but never `LOST`."""
        number, prompt = self._groups[episodes[0].group]

        async def packed(worker: RemoteWorker) -> Group:
            await asyncio.gather(*(worker.episode(prompt, place) for place in episodes if place not in worker.ended))
            return await worker.pack(episodes, newest)

        return await self._on(number, packed)

    def drop(self, episodes: Sequence[EpisodeId]) -> None:
        """Have the worker of a group end and forget its episodes."""
        if episodes and (known := self._groups.pop(episodes[0].group, None)) is not None:
            self._workers[known[0]].forget(episodes, [episodes[0].group])  # what was recorded of it, too

    def over(self, groups: Sequence[Group]) -> None:
        """Have workers forget groups that the queue has deleted."""
        for group in groups:
            if (known := self._groups.pop(group.number, None)) is not None:
                self._workers[known[0]].forget(groups=[group.number])

    def retain(self, needed: Mapping[int, int]) -> None:
        """Let go of payloads that no record names. `needed`: position of the oldest one that one names, by number of the worker."""
        for worker in self._alive():
            worker.tell(WorkerRetain(dict(needed)))

    # ------------------------------------------------------------ internals

    async def _on(self, number: int, ask: Callable[[RemoteWorker], Awaitable[T]]) -> T:
        """Ask a worker, and whoever takes its place if it is lost meanwhile: that one goes on from the answers that were recorded."""
        while True:
            while (worker := self._workers.get(number)) is None or worker.gone:
                await asyncio.sleep(_LOOK_S)
            try:
                return await ask(worker)
            except TrajectoryRejected as rejected:
                if rejected.reason != LOST:
                    raise
                await asyncio.sleep(_LOOK_S)  # one that ends well says so before it is gone

    async def _some(self) -> RemoteWorker:
        """Return the worker with the fewest episodes, once all have joined."""
        while len(self._workers) < self._config.rollout.workers or not (alive := self._alive()):
            await asyncio.sleep(_LOOK_S)
        return min(alive, key=lambda one: (one.running, one.joined.number))

    def _alive(self) -> list[RemoteWorker]:
        return [worker for worker in self._workers.values() if not worker.gone]

    async def _follow(self, worker: RemoteWorker) -> None:
        try:
            while True:
                self._take(worker, await worker.news(WorkerAsk()))
        except AsyncmoeError as error:
            worker.lose(str(error))

    def _take(self, worker: RemoteWorker, news: WorkerNews) -> None:
        self._figures[worker.joined.number] = figures.read(news.figures)
        for busy in news.busy:
            self._generated(*busy)
        for name, count in news.tokens.items():
            setattr(self._pool, name, getattr(self._pool, name) + count)
        worker.requests = news.requests
        self._gates.note(worker, news.uses)

    def _lost(self, worker: RemoteWorker) -> None:
        log.error("%s is lost: %s", worker.name, worker.gone)
        self.times_lost += 1
        self._gates.count()
