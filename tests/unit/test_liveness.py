"""An engine that runs but generates nothing: it gets no requests, and is fenced in bounded time. With real engines: tests/engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from asyncmoe.errors import EngineError, TrajectoryRejected
from asyncmoe.rollout.engines.liveness import Liveness
from asyncmoe.rollout.engines.pool import Member, Pool
from asyncmoe.rollout.engines.types import Sampling
from tests.unit.fake_engine import fake, handles

LIMIT_S = 1.2
SAMPLING = Sampling(1.0, 3, ())


def watched(engines: int, hung: int, seconds: float, paused: Callable[[Member], bool] = lambda member: False) -> tuple[Pool, list[str]]:
    """Ask for responses for `seconds` while the first `hung` engines generate nothing; also returns who was asked in the second half."""

    async def run() -> tuple[Pool, list[str]]:
        pool = Pool(handles(engines), 8, 0.3, lambda *_: None)
        for member in pool.members[:hung]:
            fake(member.engine).hangs = True
        asked: list[str] = []
        watch = asyncio.create_task(Liveness(pool, LIMIT_S, paused).run())
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            before = {member.engine.name: member.in_flight for member in pool.members}
            asking = asyncio.create_task(pool.generate((1,), SAMPLING))
            await asyncio.sleep(0)
            now = [member.engine.name for member in pool.members if member.in_flight > before[member.engine.name]]
            asked += now if time.monotonic() > begin + seconds / 2 else []
            with suppress(TrajectoryRejected, EngineError):
                await asking
            await asyncio.sleep(0.01)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        return pool, asked

    return asyncio.run(run())


def test_a_silent_engine_is_fenced_in_bounded_time_and_the_others_serve() -> None:
    pool, asked = watched(engines=3, hung=1, seconds=2 * LIMIT_S)
    assert [member.fenced is not None for member in pool.members] == [True, False, False]
    assert "engines.hang_timeout_s 1.2" in str(pool.members[0].fenced)
    assert set(asked) == {"engine.1"}
    assert len(asked) > 20


def test_a_suspect_gets_no_requests_long_before_it_is_fenced() -> None:
    pool, asked = watched(engines=2, hung=1, seconds=0.7 * LIMIT_S)
    assert [member.fenced for member in pool.members] == [None, None]
    assert [member.suspect for member in pool.members] == [True, False]
    assert "engine.0" not in asked


def test_a_paused_engine_is_not_silent() -> None:
    pool, _ = watched(engines=1, hung=1, seconds=1.5 * LIMIT_S, paused=lambda member: True)
    assert pool.members[0].fenced is None


@pytest.mark.parametrize("hung", [True, False])
def test_an_idle_engine_is_probed(hung: bool) -> None:
    async def run() -> Pool:
        pool = Pool(handles(1), 8, 5.0, lambda *_: None)
        fake(pool.members[0].engine).hangs = hung
        with suppress(TimeoutError):
            await asyncio.wait_for(Liveness(pool, LIMIT_S, lambda member: False).run(), 1.5 * LIMIT_S)
        return pool

    assert (asyncio.run(run()).members[0].fenced is not None) == hung


def test_an_engine_that_recovers_serves_again() -> None:
    async def run() -> Pool:
        pool = Pool(handles(1), 8, 0.2, lambda *_: None)
        engine = fake(pool.members[0].engine)
        engine.hangs = True
        with pytest.raises(TrajectoryRejected, match="engine_timeout"):
            await pool.generate((1,), SAMPLING)
        assert pool.members[0].suspect
        engine.hangs = False
        await pool.generate((1,), SAMPLING)  # the only engine, suspect or not
        return pool

    assert not asyncio.run(run()).members[0].suspect
