"""Fenced engines of this machine start again, with a wait that doubles, as often as the configuration says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncmoe.config import parse
from asyncmoe.errors import EngineError
from asyncmoe.rollout.engines.engine import EngineProcess
from asyncmoe.rollout.engines.lifecycle import EngineLifecycle
from asyncmoe.rollout.engines.membership import LEFT
from asyncmoe.rollout.engines.pool import Pool
from asyncmoe.rollout.engines.restarts import Restarts
from asyncmoe.rollout.engines.types import Sampling
from asyncmoe.rollout.engines.weight_updates.coordinator import WeightUpdateCoordinator
from asyncmoe.rpc.messages import Engines, EnginesAsk
from tests.unit.fake_engine import FakeHandle

BACKOFF_S = 0.02
SAMPLING = Sampling(1.0, 3, ())


class Process(FakeHandle):
    url = ""

    def __init__(self, name: str, starts: bool = True) -> None:
        super().__init__(name)
        self.stopped, self._starts = False, starts

    async def wait_ready(self) -> None:
        if not self._starts:
            self.client.dead = True
            raise EngineError(f"{self.name} did not start: no memory")

    async def stop(self) -> None:
        self.stopped = True


def restarted(limit: int, starts: Callable[[int], bool], deaths: int = 1) -> tuple[Pool, list[Any], list[tuple[int, int]]]:
    """Kill engine 0 of two `deaths` times and wait for what follows; also returns every (index, attempt) started."""

    async def run() -> tuple[Pool, list[Any], list[tuple[int, int]]]:
        engines: list[EngineProcess] = [Process("engine.0"), Process("engine.1")]
        pool, made = Pool(engines, 8, 5.0, lambda *_: None), []

        def start(index: int, attempt: int) -> EngineProcess:
            made.append((index, attempt))
            return Process(f"engine.{index}", starts(attempt))

        running = asyncio.create_task(Restarts(pool, engines, limit, start, BACKOFF_S).run())
        for _ in range(deaths):
            engines[0].kill()
            pool.fence_dead()
            for _ in range(40):
                await asyncio.sleep(0.05)
                if engines[0].died is None:
                    break
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return pool, engines, made

    return asyncio.run(run())


def test_a_dead_engine_is_replaced_and_waits_for_a_version() -> None:
    pool, engines, made = restarted(3, lambda attempt: True)
    assert made == [(0, 1)]
    assert [member.engine.name for member in pool.present] == ["engine.1", "engine.0"]
    assert [member.waiting for member in pool.present] == [False, True]
    assert pool.present[1].engine is engines[0]


def test_a_start_that_fails_is_tried_again_until_the_limit() -> None:
    pool, _, made = restarted(3, lambda attempt: attempt == 3)
    assert made == [(0, 1), (0, 2), (0, 3)]
    assert len(pool.present) == 2
    pool, engines, made = restarted(2, lambda attempt: False)
    assert made == [(0, 1), (0, 2)]
    assert [member.engine.name for member in pool.present] == ["engine.1"]
    assert engines[0].stopped  # one that is late would keep its memory


def test_the_limit_counts_every_death() -> None:
    pool, _, made = restarted(2, lambda attempt: True, deaths=3)
    assert made == [(0, 1), (0, 2)]
    assert [member.engine.name for member in pool.present] == ["engine.1"]


def test_a_lost_engine_is_missing_until_it_has_started_again() -> None:
    async def run() -> list[tuple[int, int]]:
        engines: list[EngineProcess] = [Process("engine.0"), Process("engine.1")]
        pool = Pool(engines, 8, 5.0, lambda *_: None)
        config = parse({"run": {"dir": "unused", "steps": 1}, "model": {"path": "unused"}, "task": {"kind": "arithmetic"}})
        coordinator = WeightUpdateCoordinator(pool, 5.0, nothing, lambda *_: None)
        lifecycle = EngineLifecycle(config, pool, engines, lambda index, attempt: Process("engine.0"), coordinator)
        old = pool.members[0]
        counts = [(lifecycle.lost(), lifecycle.missing())]
        for change in (lambda: pool.fence(old, "hung"), lambda: pool.remove(old), lambda: pool.fence(pool.members[0], LEFT)):
            change()
            counts.append((lifecycle.lost(), lifecycle.missing()))
        return counts

    assert asyncio.run(run()) == [(0, 0), (1, 1), (1, 0), (1, 0)]


def test_the_trainer_hears_that_a_restarted_engine_waits_for_a_version() -> None:
    async def run() -> Engines:
        pool, _, _ = await asyncio.to_thread(restarted, 3, lambda attempt: True)
        pool.members[0].waiting = False
        coordinator = WeightUpdateCoordinator(pool, 5.0, nothing, lambda *_: None)
        coordinator.engines_started()
        reply = await coordinator.handle(EnginesAsk(1.0))
        assert isinstance(reply, Engines)
        return reply

    assert [(one.name, one.waiting) for one in asyncio.run(run()).engines] == [("engine.1", False), ("engine.0", True)]


async def nothing(_: int) -> None:
    """A version is published."""


def test_none_starts_again_with_limit_0() -> None:
    _, _, made = restarted(0, lambda attempt: True)
    assert made == []


ONE = {"run": {"dir": "unused", "steps": 1}, "model": {"path": "unused"}, "task": {"kind": "arithmetic"}, "engines": {"restarts": 1}}


SPARSE = {"sync": {"every": 2}, "queue": {"staleness": {"max_staleness": 1}}}


def alone(**sections: Any) -> tuple[Pool, EngineLifecycle]:
    """A pool of one engine, which has died, and its lifecycle."""
    engines: list[EngineProcess] = [Process("engine.0")]
    pool = Pool(engines, 8, 5.0, lambda *_: None)
    coordinator = WeightUpdateCoordinator(pool, 5.0, nothing, lambda *_: None)
    coordinator.engines_started()
    lifecycle = EngineLifecycle(parse(ONE | sections), pool, engines, lambda index, attempt: Process("engine.0"), coordinator)
    lifecycle._again._backoff_s = BACKOFF_S
    engines[0].kill()
    pool.fence_dead()
    return pool, lifecycle


def test_while_the_last_engine_starts_again_requests_wait_and_the_trainer_is_told() -> None:
    async def run() -> None:
        pool, lifecycle = alone()
        asked = await lifecycle._coordinator.handle(EnginesAsk(1.0))
        assert isinstance(asked, Engines)
        assert asked.awaited
        assert not asked.engines
        request = asyncio.create_task(pool.generate((1,), SAMPLING))
        work = [asyncio.create_task(one) for one in (lifecycle._again.run(), pool.watch())]
        while not pool.present:
            await asyncio.sleep(0.01)
        asked = await lifecycle._coordinator.handle(EnginesAsk(1.0))
        assert isinstance(asked, Engines)
        assert [one.waiting for one in asked.engines] == [True]
        assert not asked.awaited
        await asyncio.sleep(0.1)
        assert not request.done(), "the new engine has no version yet"
        pool.members[0].serve(7, 0)
        answer = await request
        assert (answer.salt, pool.members[0].in_flight) == (7, 0)
        pool.members[0].engine.kill()  # its only restart is used up
        with pytest.raises(EngineError, match=r"no engine is left: engine\.0"):
            await work[1]
        work[0].cancel()

    asyncio.run(run())


@pytest.mark.parametrize("sections", [{"sync": {"method": "broadcast"}}, {"engines": {"restarts": 0}}, SPARSE])
def test_the_run_ends_with_its_last_engine_if_the_trainer_could_not_send_its_weights_again(sections: dict[str, Any]) -> None:
    async def run() -> None:
        pool, _ = alone(**sections)
        assert not pool.awaited
        with pytest.raises(EngineError, match=r"no engine is left: engine\.0"):
            await pool.watch()

    asyncio.run(run())


def test_engines_that_have_left_do_not_come_back() -> None:
    async def run() -> None:
        pool, _ = alone()
        pool.members[0].fenced = LEFT
        assert not pool.awaited

    asyncio.run(run())


def test_engines_of_other_machines_are_awaited_for_the_time_of_a_start() -> None:
    async def run() -> None:
        pool, _ = alone(engines={"join": True, "start_timeout_s": 0.2})
        assert pool.awaited
        await asyncio.sleep(0.3)
        assert not pool.awaited

    asyncio.run(run())
