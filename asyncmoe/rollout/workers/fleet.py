"""The rollout workers of a run, as the controller has them: they join, run groups, and are lost.

A group belongs to the worker that its first episode was given to: its members share prefixes there, and it is one payload. A worker that
does not answer is lost: its unfinished groups start again elsewhere, and its finished ones are read from the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from asyncmoe.config import Config
from asyncmoe.engines import backend
from asyncmoe.engines.engine import Engine
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import AsyncmoeError, ConfigError, EngineError, ProtocolError, TrajectoryRejected
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.flights import LOST, RemoteTrajectory
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.workers import figures
from asyncmoe.rollout.workers.figures import Figures, added
from asyncmoe.rollout.workers.gates import WorkerGates
from asyncmoe.rollout.workers.remote import RemoteWorker
from asyncmoe.rollout.workers.worker import Sampled
from asyncmoe.rpc.messages import Done
from asyncmoe.rpc.peers import check, facts
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.worker_messages import WorkerBegin, WorkerEnd, WorkerJoin, WorkerNews, WorkerRetain, WorkerTotals

log = logging.getLogger(__name__)
_LOOK_S = 0.05
_IDLE_S = 10.0
"""Seconds for which a worker may have no engine that serves before its groups start again elsewhere."""


class WorkerFleet:
    """All rollout workers of a run. For the controller's event loop.

    Attributes:
        sampled: called with what an episode leaves for readers of samples.
        times_lost: how often a worker was lost.

    Args:
        pool: the run's engines, which the workers use.
        generated: called as `asyncmoe.rollout.recorder.Recorder.generated`.
        first: returns what a worker that joins now is told first.
        address_of: as `asyncmoe.engines.backend.address_of`.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        generated: Callable[[str, float, float], None],
        first: Callable[[], WorkerBegin],
        address_of: Callable[[Engine], tuple[str, str]] = backend.address_of,
    ) -> None:
        self._config, self._pool, self._generated, self._first = config, pool, generated, first
        self._workers: dict[int, RemoteWorker] = {}
        self._following: dict[int, asyncio.Task[None]] = {}
        self._groups: dict[int, RemoteWorker] = {}
        self._began, self._told_missing, self._idle = time.monotonic(), False, dict[int, float]()
        self._totals: dict[int, WorkerTotals] = {}
        self._figures: dict[int, Figures] = {}
        self._ended_figures = Figures()
        self._recorded: dict[int, int] = {}
        self.sampled: Sampled = lambda place, left: None
        self.times_lost = 0
        self._gates = pool.elsewhere = WorkerGates(config, pool, self._alive, address_of)

    # ------------------------------------------------------------ workers

    async def join(self, request: WorkerJoin) -> Done:
        """Meet a worker.

        Raises:
            ConfigError: it has another configuration, or the run has no such worker.
            UserError: its packages or its clock differ from the controller's.
            ProtocolError: another worker has its number.
        """
        config = self._config
        if not 1 <= request.number <= config.rollout.workers:
            raise ConfigError("rollout worker", got=f"number {request.number}", expected=f"1 to rollout.workers = {config.rollout.workers}")
        if request.config_digest != config.digest:
            raise ConfigError("configuration of a rollout worker", got="another one", expected="the controller's")
        check(facts("controller"), request.facts, config.cluster.max_clock_skew_s)
        before = self._workers.get(request.number)
        if before is not None and not before.gone:
            raise ProtocolError(f"rollout worker {request.number} has joined already")
        worker = RemoteWorker(request, self._lost, lambda place, left: self.sampled(place, left))
        try:
            self._recorded |= dict.fromkeys(await worker.begin(self._first()), request.number)
        except BaseException:
            await worker.close()
            raise
        self._workers[request.number], self._totals[request.number] = worker, WorkerTotals()
        self._ended_figures = added([self._ended_figures, self._figures.pop(request.number, Figures())])
        self._following[request.number] = asyncio.create_task(self._follow(worker))
        log.info("%s has joined, process %d on %s", worker.name, request.rendezvous.pid, request.rendezvous.host)
        return Done()

    def holders(self) -> Mapping[int, Rendezvous]:
        """Where each worker that is not lost serves trajectories, by its number."""
        return {number: worker.joined.rendezvous for number, worker in self._workers.items() if not worker.gone}

    def lost(self) -> set[tuple[str, int]]:
        """Return host and process id of each worker that is lost and not replaced: it may still run, and hang."""
        gone = [worker.joined.rendezvous for worker in self._workers.values() if worker.gone]
        return {(one.host, one.pid) for one in gone}

    def figures(self) -> Figures:
        """Return the statistics of all workers, those included that are lost."""
        return added([self._ended_figures, *self._figures.values()])

    async def run(self) -> None:
        """Follow the engines of the pool, and the workers; never returns.

        Raises:
            EngineError: no worker joined in time, or all are lost and none comes back.
        """
        alone = time.monotonic()
        while True:
            if self._alive():
                alone = time.monotonic()
                self._gates.tell()
                self._abandon_idle()
            elif time.monotonic() - alone > self._config.engines.start_timeout_s:
                whys = "; ".join(f"{worker.name}: {worker.gone}" for worker in self._workers.values())
                raise EngineError(f"no rollout worker is left: {whys or 'none has joined'} (engines.start_timeout_s)")
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Tell all workers that the run is over."""
        alive = self._alive()
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*self._following.values(), self._gates.close(), return_exceptions=True)
        await asyncio.gather(*(worker.ask(WorkerEnd()) for worker in alive), return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))

    # ------------------------------------------------------------ groups, for the producer

    async def episode(self, prompt: Prompt, place: EpisodeId) -> tuple[RemoteTrajectory, ...]:
        """Run and score one episode on the worker of its group. Raises as `RemoteWorker.episode`."""
        while (worker := self._groups.get(place.group)) is None:
            if (free := [one for one in self._alive() if one.width]) and self._complete():
                before = self._recorded.pop(place.group, 0)
                worker = min(free, key=lambda one: (one.joined.number != before, len(one.running) / one.width, one.joined.number))
                self._groups[place.group] = worker
            else:
                await asyncio.sleep(_LOOK_S)
        return await worker.episode(prompt, place)

    async def pack(self, episodes: Sequence[EpisodeId], newest: int) -> Group:
        """Make a group of its episodes. Raises as `RemoteWorker.pack`."""
        if (worker := self._groups.get(episodes[0].group)) is None:
            raise TrajectoryRejected(LOST, f"the worker of group {episodes[0].group} is lost")
        return await worker.pack(episodes, newest)

    def drop(self, episodes: Sequence[EpisodeId]) -> None:
        """Have the worker of a group end and forget its episodes."""
        if episodes and (worker := self._groups.pop(episodes[0].group, None)) is not None:
            worker.stop(episodes)
            worker.forget(episodes[0].group)  # what was recorded of it, too

    def over(self, groups: Sequence[Group]) -> None:
        """Have workers forget groups that the queue has deleted."""
        for group in groups:
            if group.holder and (worker := self._groups.pop(group.number, None)) is not None:
                worker.forget(group.number)

    async def retain(self, needed: Mapping[int, int]) -> None:
        """Let go of payloads that no record names. `needed`: position of the oldest one that one names, by number of the worker."""
        for worker in self._alive():
            worker.tell(WorkerRetain(dict(needed)))

    # ------------------------------------------------------------ internals

    def _complete(self) -> bool:
        """Whether groups may be given to the workers that there are: all have joined once, or there was time enough."""
        missing = [number for number in range(1, self._config.rollout.workers + 1) if number not in self._workers]
        if missing and time.monotonic() - self._began < self._config.engines.start_timeout_s:
            return False
        if missing and not self._told_missing:
            self._told_missing = True
            log.warning("rollout workers %s have not joined within engines.start_timeout_s; the run begins without them", missing)
        return True

    def _abandon_idle(self) -> None:
        """Have groups start again elsewhere whose worker has had no engine that serves for a while, if another has one."""
        now, some = time.monotonic(), any(worker.width for worker in self._alive())
        for worker in self._alive():
            number = worker.joined.number
            if worker.width or not some or not worker.running:
                self._idle.pop(number, None)
            elif now - self._idle.setdefault(number, now) > _IDLE_S:
                self._idle.pop(number)
                log.warning("%s has no engine that serves: its groups start again elsewhere", worker.name)
                worker.stop(list(worker.running))

    def _alive(self) -> list[RemoteWorker]:
        return [worker for worker in self._workers.values() if not worker.gone]

    async def _follow(self, worker: RemoteWorker) -> None:
        try:
            while True:
                self._take(worker, await worker.news())
        except AsyncmoeError as error:
            worker.lose(str(error))

    def _take(self, worker: RemoteWorker, news: WorkerNews) -> None:
        self._figures[worker.joined.number] = figures.read(news.figures)
        for busy in news.busy:
            self._generated(busy.name, busy.begin, busy.end)
        before, now = self._totals[worker.joined.number], news.totals
        pool = self._pool
        pool.generated_tokens += now.generated - before.generated
        pool.lost_tokens += now.lost - before.lost
        pool.recomputed_tokens += now.recomputed - before.recomputed
        pool.recalled_tokens += now.recalled - before.recalled
        self._totals[worker.joined.number] = now
        self._gates.note(worker, news.uses)

    def _lost(self, worker: RemoteWorker) -> None:
        log.error("%s is lost: %s", worker.name, worker.gone)
        self.times_lost += 1
        self._groups = {number: other for number, other in self._groups.items() if other is not worker}
        self._gates.lost(worker)
