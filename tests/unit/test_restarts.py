"""A controller without engines: losses are counted, and it waits for engines that restart."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncmoe.engines.membership import LEFT
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.types import Sampling
from asyncmoe.errors import EngineError
from asyncmoe.rollout.engine_lifecycle import EngineLifecycle
from asyncmoe.rpc.messages import Engines, EnginesAsk
from tests.configs import minimal
from tests.unit.asynchronous import asynchronous
from tests.unit.fake_engine import FakeHandle, coordinator_of

SAMPLING = Sampling(1.0, 3, ())
SPARSE = {"sync": {"every": 2}, "queue": {"staleness": {"max_staleness": 1}}}


def made(*names: str, **sections: Any) -> tuple[Pool, EngineLifecycle]:
    """A pool of engines that serve, and its lifecycle."""
    pool = Pool([FakeHandle(name) for name in names], 8, 5.0, lambda *_: None)
    return pool, EngineLifecycle(minimal(**{"engines": {"restarts": 1}} | sections), pool, coordinator_of(pool))


def alone(**sections: Any) -> tuple[Pool, EngineLifecycle]:
    """A pool of one engine, which has died."""
    pool, lifecycle = made("engine.0", **sections)
    pool.members[0].engine.kill()
    pool.fence_dead()
    return pool, lifecycle


async def asked(lifecycle: EngineLifecycle) -> Engines:
    return await lifecycle._coordinator.handle(EnginesAsk(1.0))  # type: ignore[return-value]


def test_a_lost_engine_is_missing_until_it_has_started_again() -> None:
    async def run() -> list[tuple[int, int]]:
        pool, lifecycle = made("engine.0", "engine.1")
        old = pool.members[0]
        counts = [(lifecycle.lost(), lifecycle.missing())]
        for change in (lambda: pool.fence(old, "hung"), lambda: pool.remove(old), lambda: pool.fence(pool.members[0], LEFT)):
            change()
            counts.append((lifecycle.lost(), lifecycle.missing()))
        return counts

    assert asyncio.run(run()) == [(0, 0), (1, 1), (1, 0), (1, 0)]


@asynchronous
async def test_while_the_last_engine_starts_again_requests_wait_and_the_trainer_is_told() -> None:
    pool, lifecycle = alone()
    told = await asked(lifecycle)
    assert told.awaited
    assert not told.engines
    request, watching = asyncio.create_task(pool.generate((1,), SAMPLING)), asyncio.create_task(pool.watch())
    await asyncio.sleep(0.1)
    pool.remove(pool.members[0])
    pool.join(FakeHandle("engine.0"))
    told = await asked(lifecycle)
    assert [one.waiting for one in told.engines] == [True]
    assert not told.awaited
    await asyncio.sleep(0.1)
    assert not request.done(), "the new engine has no version yet"
    pool.members[0].serve(7, 0)
    answer = await request
    assert (answer.salt, pool.members[0].in_flight) == (7, 0)
    watching.cancel()


@asynchronous
@pytest.mark.parametrize("sections", [{"sync": {"method": "broadcast"}}, {"engines": {"restarts": 0}}, SPARSE])
async def test_the_run_ends_with_its_last_engine_if_the_trainer_could_not_send_its_weights_again(sections: dict[str, Any]) -> None:
    pool, _ = alone(**sections)
    assert not pool.awaited
    with pytest.raises(EngineError, match=r"no engine is left: engine\.0"):
        await pool.watch()


@asynchronous
async def test_lost_engines_are_awaited_for_the_time_of_a_start() -> None:
    pool, _ = alone(engines={"start_timeout_s": 0.2})
    assert pool.awaited
    await asyncio.sleep(0.3)
    assert not pool.awaited
