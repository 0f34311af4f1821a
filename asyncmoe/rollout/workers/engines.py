"""The engines of a rollout worker: keep its pool in the state that the controller reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from asyncmoe.engines.engine import Engine
from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool
from asyncmoe.rpc.worker_messages import EngineUse, WorkerEngine, WorkerEngines

Connect = Callable[[str, str, str], Engine]
"""Returns the client of the engine with this name, URL and key."""


@dataclass(eq=False)
class LentEngine:
    """An engine that the worker may use but only the controller can end; an `asyncmoe.engines.engine.EngineHandle`."""

    name: str
    client: Engine
    tp: int = 1
    ep: int = 1
    host: str = ""
    pid: int = 0
    died: str | None = None

    def kill(self, why: str = "") -> None:
        """Do nothing: the controller learns from the next news that the engine is fenced, and ends it."""


class LentEngines:
    """Keeps a pool as the controller wants it.

    Args:
        connect: as `asyncmoe.engines.backend.connect`.
    """

    def __init__(self, pool: Pool, connect: Connect) -> None:
        self._pool, self._connect = pool, connect
        self._lent: dict[int, Member] = {}
        """By the controller's serial number of the engine."""

    async def use(self, told: WorkerEngines) -> None:
        """Use these engines from now on, with the gate open or closed."""
        if not told.open:
            self._pool.hold()
        gone = [self._lent.pop(serial) for serial in self._lent.keys() - {one.serial for one in told.engines}]
        for member in gone:
            member.fenced = "it is no longer the worker's"
            self._pool.remove(member)
        for one in told.engines:
            member = self._lent.get(one.serial) or self._join(one)
            member.serve(one.version, one.lineage)
            member.suspect, member.waiting, member.leaving = one.suspect, one.waiting, one.leaving
        if told.open:
            self._pool.release()
        for member in gone:
            await member.engine.client.close()

    def uses(self) -> tuple[EngineUse, ...]:
        """Return the state of each engine."""
        now = time.monotonic()
        return tuple(
            EngineUse(serial, member.in_flight, now - member.heard if member.heard else None, member.fenced or "")
            for serial, member in self._lent.items()
        )

    async def close(self) -> None:
        """Close the connections to all engines."""
        await self.use(WorkerEngines((), open=False))

    def _join(self, one: WorkerEngine) -> Member:
        member = self._lent[one.serial] = self._pool.join(LentEngine(one.name, self._connect(one.name, one.url, one.key)))
        return member
