"""Starts engines of this machine again that were fenced. A restarted engine takes requests from the next version on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from asyncmoe.errors import AsyncmoeError
from asyncmoe.rollout.engines.engine import EngineProcess
from asyncmoe.rollout.engines.member import Member
from asyncmoe.rollout.engines.pool import Pool

log = logging.getLogger(__name__)
_POLL_S = 0.2
BACKOFF_S = 5.0
"""Seconds before the first restart of an engine; doubles with each further restart."""


class Restarts:
    """Replaces fenced engines of a pool.

    Args:
        engines: the processes by index; a restarted engine takes the place of the old one, so that the owner of the list ends it.
        limit: restarts of one engine, after which it stays fenced.
        start: starts engine `index` as number `attempt` (1 for the first restart); called in the event loop's thread.
        backoff_s: see `BACKOFF_S`.
    """

    def __init__(
        self,
        pool: Pool,
        engines: list[EngineProcess],
        limit: int,
        start: Callable[[int, int], EngineProcess],
        backoff_s: float = BACKOFF_S,
    ) -> None:
        self._pool, self._engines, self._limit, self._start, self._backoff_s = pool, engines, limit, start, backoff_s
        self._attempts = [0] * len(engines)
        self._restarting: dict[int, asyncio.Task[None]] = {}

    @property
    def left(self) -> bool:
        """Whether an engine is about to start again, or may be."""
        return bool(self._restarting) or any(attempts < self._limit for attempts in self._attempts)

    async def run(self) -> None:
        """Restart what is fenced; never returns. An engine that cannot be restarted is logged, and the others go on without it."""
        try:
            while True:
                for index, engine in enumerate(self._engines):
                    if index not in self._restarting and self._fenced(engine) and self._attempts[index] < self._limit:
                        self._restarting[index] = asyncio.create_task(self._restart(index))
                for index, task in list(self._restarting.items()):
                    if task.done():
                        self._restarting.pop(index).result()
                await asyncio.sleep(_POLL_S)
        finally:
            for task in self._restarting.values():
                task.cancel()
            await asyncio.gather(*self._restarting.values(), return_exceptions=True)

    async def _restart(self, index: int) -> None:
        old = self._engines[index]
        self._attempts[index] += 1
        attempt = self._attempts[index]
        await asyncio.sleep(self._backoff_s * 2 ** (attempt - 1))
        log.warning("%s starts again, restart %d of %d", old.name, attempt, self._limit)
        await old.stop()
        try:
            engine = self._engines[index] = self._start(index, attempt)
            await engine.wait_ready()
        except AsyncmoeError as error:
            log.error("%s did not start again: %s", old.name, error)
            await self._engines[index].stop()  # it may still be starting, and hold memory
            return
        for member in self._members_of(old):
            self._pool.remove(member)
        self._pool.join(engine)
        log.info("%s has started again; it serves from the next version on", engine.name)

    def _fenced(self, engine: EngineProcess) -> bool:
        members = self._members_of(engine)
        return engine.died is not None if not members else all(member.fenced is not None for member in members)

    def _members_of(self, engine: EngineProcess) -> list[Member]:
        return [member for member in self._pool.members if member.engine.name == engine.name]
