"""What a controller does for its engines besides asking them: it waits for their start, fences, restarts, probes and counts them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from asyncmoe.config import Config
from asyncmoe.rollout.engines.engine import EngineProcess
from asyncmoe.rollout.engines.liveness import Liveness
from asyncmoe.rollout.engines.membership import LEFT, Membership
from asyncmoe.rollout.engines.pool import Member, Pool
from asyncmoe.rollout.engines.probes import Prober
from asyncmoe.rollout.engines.restarts import Restarts
from asyncmoe.rollout.engines.weight_updates.coordinator import WeightUpdateCoordinator

log = logging.getLogger(__name__)


class EngineKeeper:
    """Looks after the engines of one run.

    Attributes:
        membership: engines of other machines.
        prober: compares engines with the trainer.

    Args:
        engines, start: as for `Restarts`.
        coordinator: learns when all engines have started.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        engines: list[EngineProcess],
        start: Callable[[int, int], EngineProcess],
        coordinator: WeightUpdateCoordinator,
    ) -> None:
        section = config.engines
        self._section, self._pool, self._engines, self._coordinator = section, pool, engines, coordinator
        self.membership = Membership(config, pool, coordinator.updating)
        self.prober = Prober(pool, config.run.seed, config.rollout.request_timeout_s, config.verify.anomalies.kl_engine.above)
        self._alive = Liveness(pool, section.hang_timeout_s, coordinator.paused)
        self._again = Restarts(pool, engines, section.restarts, start)
        self._lost: list[Member] = []

    def parts(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return the work, to be done at the same time; only the first part, the start, ends. Each part raises what ends the run."""
        # Before the start, `wait_ready` watches the engines and reports the reason for a failed start better.
        runs = (self._pool.watch, self._alive.run, self._again.run, self.prober.run)
        return (self._start_all(), *(self._once_started(run) for run in runs))

    def lost(self) -> int:
        """Return the number of engines that died or were fenced so far; one that has left is not lost. Call it every second."""
        self._lost += [member for member in self._down() if member not in self._lost]
        return len(self._lost)

    def missing(self) -> int:
        """Return the number of lost engines that have not started again."""
        return len(self._down())

    def _down(self) -> list[Member]:
        return [member for member in self._pool.members if member.fenced not in (None, LEFT)]

    async def _start_all(self) -> None:
        if self._section.join:
            await self.membership.wait_joined(self._section.start_timeout_s)
        else:
            await asyncio.gather(*(engine.wait_ready() for engine in self._engines))
        self._coordinator.engines_started()
        log.info("%d engine(s) ready", len(self._pool.present))

    async def _once_started(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._coordinator.wait_started()
        await run()
