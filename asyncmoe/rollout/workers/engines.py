"""The engines of a rollout worker: what the controller says of them, made so in the worker's pool."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from asyncmoe.engines.engine import Engine
from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool
from asyncmoe.rpc.worker_messages import Busy, EngineUse, WorkerEngine, WorkerEngines

Connect = Callable[[str, str, str], Engine]
"""Returns the client of the engine with this name, URL and key."""
_MOST_BUSY = 1 << 14
"""Intervals kept until the controller asks; older ones are forgotten."""


class LentEngine:
    """An engine that the controller lets the worker use, and alone can end; an `asyncmoe.engines.engine.EngineHandle`."""

    tp = ep = 1

    def __init__(self, told: WorkerEngine, client: Engine) -> None:
        self.name, self.serial, self.host, self.client = told.name, told.serial, "", client
        self.died: str | None = None

    def kill(self) -> None:
        """Do nothing: the controller hears with the next news that it is fenced, and ends it."""


class LentEngines:
    """Keeps a pool as the controller wants it.

    Args:
        connect: as `asyncmoe.engines.backend.connect`.

    Attributes:
        busy: intervals of generation that the controller has not heard of.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self.busy: deque[Busy] = deque(maxlen=_MOST_BUSY)
        self._lent: dict[int, LentEngine] = {}

    def record(self, name: str, begin: float, end: float) -> None:
        """Note an interval in which an engine was generating, as `Pool` records it."""
        self.busy.append((name, begin, end))

    async def use(self, pool: Pool, told: WorkerEngines) -> None:
        """Use these engines from now on, with the gate open or closed."""
        if not told.open:
            pool.hold()
        gone = self._removed(pool, {one.serial for one in told.engines})
        for one in told.engines:
            member = self._member(pool, one)
            member.serve(one.version, one.lineage)
            member.adapter = one.adapter
            member.suspect, member.waiting, member.leaving = one.suspect, one.waiting, one.leaving
        if told.open:
            pool.release()
        for client in gone:
            await client.close()

    def uses(self, pool: Pool) -> tuple[EngineUse, ...]:
        """Return what is known of each engine."""
        now = time.monotonic()
        serials = {id(engine): serial for serial, engine in self._lent.items()}
        return tuple(
            EngineUse(
                serials[id(member.engine)],
                member.in_flight,
                now - member.heard if member.heard else None,
                member.fenced or "",
                tuple(name for name, count in member.users.items() if count),
            )
            for member in pool.members
        )

    async def close(self, pool: Pool) -> None:
        """Close the connections to all engines."""
        for client in self._removed(pool, set()):
            await client.close()

    def _member(self, pool: Pool, one: WorkerEngine) -> Member:
        if one.serial not in self._lent:
            self._lent[one.serial] = LentEngine(one, self._connect(one.name, one.url, one.key))
            member = pool.join(self._lent[one.serial])
            member.slots = None  # the controller loads versions that are adapters
            return member
        (found,) = [member for member in pool.members if member.engine is self._lent[one.serial]]
        return found

    def _removed(self, pool: Pool, kept: set[int]) -> list[Engine]:
        gone = [engine for engine in self._lent.values() if engine.serial not in kept]
        for engine in gone:
            del self._lent[engine.serial]
            for member in [member for member in pool.members if member.engine is engine]:
                member.fenced = "it is no longer the worker's"
                pool.remove(member)
        return [engine.client for engine in gone]
