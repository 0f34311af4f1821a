"""Exchange the state of engines with rollout workers. Each worker uses all engines, and sends nothing while the gates are closed.

A worker is lost if it takes longer to answer than an engine may take to pause (`asyncmoe.engines.liveness`). A weight update waits for
it only briefly, as for an engine. A late worker may still send requests that name the previous version: nothing uses what is cached under
that name afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool
from asyncmoe.rollout.workers.remote import RemoteWorker
from asyncmoe.rpc.worker_messages import EngineUse, WorkerEngine, WorkerEngines
from asyncmoe.weights.coordinator.driver import PATIENCE

_LEAST_S = 30.0
"""Minimum time limit, in seconds, for a worker to confirm before it is lost. An update waits for less (`WorkerGates.late`)."""


class WorkerGates:
    """An `asyncmoe.engines.pool.Gates`. For the controller's event loop.

    Args:
        pool: the run's engines.
        alive: returns the workers that are not lost.
        answer_s: seconds within which an engine must pause.
    """

    def __init__(self, pool: Pool, alive: Callable[[], Sequence[RemoteWorker]], answer_s: float) -> None:
        self._pool, self._alive, self._answer_s = pool, alive, answer_s
        self._open = True

    async def close_gates(self) -> int:
        """Stop all workers from sending requests; return the number in flight, counting a worker that does not answer in time as one."""
        self._open = False
        self.tell(always=True)
        return await self.late() + sum(member.elsewhere for member in self._pool.present)

    def open_gates(self) -> None:
        """See `Gates`."""
        self._open = True
        self.tell(always=True)

    def tell(self, *, always: bool = False) -> None:
        """Send workers the engines and their states; unless `always`, only to those whose information is out of date. Never waits."""
        told = WorkerEngines(tuple(map(self._told, self._pool.present)), self._open)
        for worker in self._alive():
            if always or told != worker.engines:
                worker.engines = told
                task = worker.tell(told, max(self._answer_s, _LEAST_S))
                worker.telling.add(task)
                task.add_done_callback(worker.telling.discard)

    async def late(self) -> int:
        """Return the number of workers that have not confirmed the last message, after waiting a little."""
        if telling := {task for worker in self._alive() for task in worker.telling}:
            await asyncio.wait(telling, timeout=self._answer_s * PATIENCE)
        return sum(bool(worker.telling) for worker in self._alive())

    def note(self, worker: RemoteWorker, uses: Sequence[EngineUse]) -> None:
        """Take a worker's report on the engines. Reports on an engine that has restarted since are ignored."""
        if worker.gone:
            return
        worker.uses = {use.serial: use for use in uses}
        for member in self._pool.present:
            if (use := worker.uses.get(member.serial)) is None:
                continue
            if use.heard_s is not None:
                member.heard = max(member.heard, time.monotonic() - use.heard_s)
            if use.failed:
                self._pool.fence(member, use.failed)
        self.count()

    def count(self) -> None:
        """Sum the requests in flight at each engine over the workers that are not lost."""
        for member in self._pool.present:
            uses = [worker.uses.get(member.serial) for worker in self._alive()]
            member.elsewhere = sum(use.in_flight for use in uses if use is not None)

    def _told(self, member: Member) -> WorkerEngine:
        client, flags = member.engine.client, (member.suspect, member.waiting, member.leaving)
        return WorkerEngine(member.engine.name, member.serial, client.url, client.key, member.version, member.lineage, *flags)
