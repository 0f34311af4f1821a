"""Life cycle of a controller's engines: wait for them to join, take over those of the previous controller, fence, probe and count them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from asyncmoe.config import Config
from asyncmoe.engines.engine import EngineHandle
from asyncmoe.engines.engine_stay import GRACE_S
from asyncmoe.engines.liveness import Liveness
from asyncmoe.engines.member import Member
from asyncmoe.engines.membership import LEFT, Membership
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.succession import Succession
from asyncmoe.engines.takeover import judge
from asyncmoe.engines.types import EngineLost
from asyncmoe.errors import AsyncmoeError, EngineError
from asyncmoe.weights.coordinator.coordinator import WeightUpdateCoordinator

log = logging.getLogger(__name__)


class EngineLifecycle:
    """Takes over, fences, probes and counts the engines of one run.

    Attributes:
        membership: answers the engines.
        taken: set once it is known which engines of the previous controller keep their weights; set from the beginning if the run had no
            previous controller.

    Args:
        coordinator: learns when all engines have started.
        succession: this controller's position among those of its run; None if engines do not outlive their controller
            (`Config.survives_controller`).
    """

    def __init__(self, config: Config, pool: Pool, coordinator: WeightUpdateCoordinator, succession: Succession | None = None) -> None:
        section = config.engines
        self._section, self._pool, self._coordinator, self._succession = section, pool, coordinator, succession
        controller = "" if succession is None else succession.controller
        self.membership = Membership(config, pool, coordinator.updating, controller, self._returned)
        self._alive = Liveness(pool, section.hang_timeout_s, coordinator.paused)
        self._lost: list[Member] = []
        if config.renews_engines:
            pool.returns = self._returns
        self.taken = asyncio.Event()
        if succession is None or not succession.before:
            self.taken.set()

    def parts(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return the coroutines to run concurrently; only the first, the start, ends. An exception in any of them ends the run."""
        return (self._start_all(), *(self._once_started(run) for run in (self._pool.watch, self._alive.run)))

    def lost(self) -> int:
        """Return the number of engines that died or were fenced so far; one that has left is not lost. Call it every second."""
        self._lost += [member for member in self._down() if member not in self._lost]
        return len(self._lost)

    def missing(self) -> int:
        """Return the number of lost engines that have not started again."""
        return len(self._down())

    def _returns(self, alone_s: float) -> bool:
        """Return whether an engine will come back after `alone_s` seconds without any."""
        return bool(self._down()) and alone_s < self._section.start_timeout_s  # engines that left do not return

    def _down(self) -> list[Member]:
        return [member for member in self._pool.members if member.fenced not in (None, LEFT)]

    async def _start_all(self) -> None:
        """Wait for engines to join or, if a previous controller was lost, for its engines to return."""
        count = self._section.count
        if not self.taken.is_set():
            await self.membership.wait_returned(self._section.orphan_s)
            self.taken.set()
            count = min(count, max(1, len(self._pool.present)))
        # An engine whose server does not start in time reports that itself.
        await self.membership.wait_joined(count, self._section.start_timeout_s + GRACE_S)
        self._coordinator.engines_started()
        log.info("%d engine(s) ready", len(self._pool.present))

    async def _returned(self, member: Member, served: str) -> str:
        """Let an engine that served a controller keep its weights; return why it cannot, or ""."""
        succession = self._succession
        if succession is None or served != succession.before:
            return f"{member.engine.name} did not serve the controller before this one"
        if self.taken.is_set():
            return f"{member.engine.name} has returned too late"
        engine, weights = member.engine, succession.weights
        try:
            if engine.died is not None:
                return f"{engine.name}: {engine.died}"
            if weights.changing:
                await self._end_update(engine)
            taken = judge(weights, await engine.client.weights_version())
            if taken is None:
                held = "may hold a part of version" if weights.changing == "writing" else "may or may not have taken over version"
                return f"{engine.name} {held} {weights.coming}, which was under way when the last controller was lost"
            if weights.changing:
                await engine.client.resume()
            await engine.client.abort()  # nothing waits any more for the last controller's requests
        except AsyncmoeError as error:
            return f"{engine.name} could not be taken over: {error}"
        member.serve(taken.version, taken.lineage)
        member.waiting = taken.waits
        log.info("%s is taken over and %s", engine.name, "waits for a version" if taken.waits else f"serves version {taken.version}")
        return ""

    async def _end_update(self, engine: EngineHandle) -> None:
        """End the update that may be open; an engine answers once it has handled all earlier requests."""
        try:
            await engine.client.end_update()
        except EngineLost:
            raise
        except EngineError as error:
            log.info("%s: no update was open: %s", engine.name, error)

    async def _once_started(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._coordinator.wait_started()
        await run()
