"""The engines of the rollout workers, as the controller divides them, and the gates in front of them.

Each worker is told which engines it uses and whether it may send requests; it answers with what it has in flight at them. For its answer it
has as long as an engine has to pause (`asyncmoe.engines.liveness`): then it is lost. A weight update waits for it only at first, as
for an engine. A late worker may still send requests that name the version before: what is cached under that name is used by nobody after.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

from asyncmoe.config import Config
from asyncmoe.engines.engine import Engine
from asyncmoe.engines.liveness import PAUSE_SHARE
from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import AsyncmoeError
from asyncmoe.rollout.workers.assignment import Located, assign, limits
from asyncmoe.rollout.workers.remote import RemoteWorker
from asyncmoe.rpc.worker_messages import EngineUse, WorkerEngine, WorkerEngines
from asyncmoe.weights.coordinator.driver import PATIENCE

_LEAST_S = 30.0
"""A worker that does not say so long that it does what it was told is lost. An update waits for less (`WorkerGates.late`)."""


class WorkerGates:
    """All workers' engines and gates; an `asyncmoe.engines.pool.Gates`. For the controller's event loop.

    Args:
        pool: the run's engines; the workers use them, each those that `assignment.assign` gives it.
        alive: returns the workers that are not lost.
        address_of: as `asyncmoe.engines.backend.address_of`.
    """

    def __init__(
        self, config: Config, pool: Pool, alive: Callable[[], Sequence[RemoteWorker]], address_of: Callable[[Engine], tuple[str, str]]
    ) -> None:
        self._most, self._answer_s = config.rollout.max_concurrent, config.engines.hang_timeout_s * PAUSE_SHARE
        self._pool, self._alive, self._address_of = pool, alive, address_of
        self._places: dict[str, str] = {}
        self._open, self._last = True, tuple[object, ...]()
        self._telling: dict[asyncio.Task[None], RemoteWorker] = {}

    async def close_gates(self) -> int:
        """Have no worker send requests; return how many are in flight at engines, a worker that does not answer in time counted as one."""
        self._open = False
        self.tell(always=True)
        late = await self.late()
        return late + sum(member.elsewhere for member in self._pool.present)

    def open_gates(self) -> None:
        """Have the workers send requests again, with the versions that the engines serve now."""
        self._open = True
        self.tell(always=True)

    def tell(self, *, always: bool = False) -> None:
        """Tell workers which engines they use and how these are, those only for whom that has changed, unless `always`. Never waits."""
        self._sweep()
        alive, members = self._alive(), self._pool.present
        now = self._open, tuple(alive), tuple(map(_state, members))
        if now == self._last and not always:
            return
        self._last = now
        engines = [Located(member.engine.name, member.engine.host) for member in members]
        self._places = assign(engines, [Located(str(one.joined.number), one.joined.host) for one in alive], self._places)
        counts = Counter(self._places.values())
        most = limits(self._most, {str(one.joined.number): counts[str(one.joined.number)] for one in alive})
        for worker in alive:
            name = str(worker.joined.number)
            own = tuple(self._told(member) for member in members if self._places[member.engine.name] == name)
            told = WorkerEngines(own, most[name], self._open)
            if always or told != worker.engines:
                worker.engines = told
                self._telling[asyncio.create_task(self._use(worker, told))] = worker

    async def late(self) -> int:
        """Return the number of workers that have not said yet that they do what they were told, after some patience with them."""
        if self._telling:
            await asyncio.wait(list(self._telling), timeout=self._answer_s * PATIENCE)
        self._sweep()
        return len({worker.joined.number for worker in self._telling.values() if not worker.gone})

    def note(self, worker: RemoteWorker, uses: Sequence[EngineUse]) -> None:
        """Take what a worker says of its engines. What it says of one that has started again since is of no use."""
        if worker.gone:
            return
        members = {member.serial: member for member in self._pool.present}
        for use in uses:
            if (member := members.get(use.serial)) is None or self._places.get(use.name) != str(worker.joined.number):
                continue
            member.elsewhere = use.in_flight
            if use.heard_s is not None:
                member.heard = max(member.heard, time.monotonic() - use.heard_s)
            if use.failed:
                self._pool.fence(member, use.failed)

    def lost(self, worker: RemoteWorker) -> None:
        """Note that a worker has no request at its engines any more."""
        for member in self._pool.present:
            if self._places.get(member.engine.name) == str(worker.joined.number):
                member.elsewhere = 0

    async def close(self) -> None:
        """Wait for no answer any more."""
        telling = list(self._telling)
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)
        self._telling.clear()

    def _told(self, member: Member) -> WorkerEngine:
        url, key = self._address_of(member.engine.client)
        flags = member.suspect, member.waiting, member.leaving
        return WorkerEngine(member.engine.name, member.serial, url, key, member.version, member.lineage, *flags)

    async def _use(self, worker: RemoteWorker, told: WorkerEngines) -> None:
        try:
            self.note(worker, await worker.use(told, max(self._answer_s, _LEAST_S)))
        except AsyncmoeError as error:
            worker.lose(str(error))

    def _sweep(self) -> None:
        for task in [task for task in self._telling if task.done()]:
            del self._telling[task]
            task.result()


def _state(member: Member) -> tuple[object, ...]:
    """Return all that can change of what a worker is told of an engine: looking is done often, and telling costs more."""
    return member.serial, member.version, member.lineage, member.suspect, member.waiting, member.leaving
