"""An engine that runs but generates nothing: it gets no requests, and is fenced in bounded time. With real engines: tests/engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from asyncmoe.engines.liveness import Liveness
from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.types import EngineLost, Generation, Sampling
from asyncmoe.errors import EngineError, TrajectoryRejected
from asyncmoe.rpc.messages import WeightsCommit, WeightsStage
from tests.unit.asynchronous import asynchronous
from tests.unit.fake_engine import coordinator_of, fake, handles

LIMIT_S = 1.2
SAMPLING = Sampling(1.0, 3, ())


async def watched(pool: Pool, seconds: float, paused: Callable[[Member], bool] = lambda member: False) -> list[str]:
    """Ask for responses for `seconds` while the first engine generates nothing; return who was asked in the second half."""
    fake(pool.members[0].engine).hangs = True
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
    assert not watch.done()
    return asked


@asynchronous
async def test_a_silent_engine_is_fenced_in_bounded_time_and_the_others_serve() -> None:
    pool = Pool(handles(3), 8, 0.3, lambda *_: None)
    asked = await watched(pool, 2 * LIMIT_S)
    assert [member.fenced is not None for member in pool.members] == [True, False, False]
    assert "engines.hang_timeout_s 1.2" in str(pool.members[0].fenced)
    assert set(asked) == {"engine.1"}
    assert len(asked) > 20


@asynchronous
async def test_a_paused_engine_is_not_silent() -> None:
    pool = Pool(handles(1), 8, 0.3, lambda *_: None)
    await watched(pool, 1.5 * LIMIT_S, paused=lambda member: True)
    assert pool.members[0].fenced is None


@asynchronous
async def test_five_probes_fail_before_an_engine_is_fenced_which_with_the_wait_for_the_first_are_the_bound() -> None:
    pool, asked = Pool(handles(1), 8, 5.0, lambda *_: None), []

    async def alive(timeout_s: float) -> bool:
        asked.append(timeout_s)
        await asyncio.sleep(timeout_s)
        return False

    fake(pool.members[0].engine).alive = alive  # type: ignore[method-assign]
    watch = asyncio.create_task(Liveness(pool, LIMIT_S, lambda member: False).run())
    while pool.members[0].fenced is None:
        await asyncio.sleep(0.01)
    watch.cancel()
    assert asked == [pytest.approx(LIMIT_S / 6)] * 5


@asynchronous
async def test_no_engine_is_fenced_because_this_process_stood_still() -> None:
    pool = Pool(handles(3), 8, 5.0, lambda *_: None)
    for member in pool.members:
        fake(member.engine).hangs = True
    watch = asyncio.create_task(Liveness(pool, LIMIT_S, lambda member: False).run())
    await asyncio.sleep(0.05)
    time.sleep(1.5 * LIMIT_S)
    for member in pool.members:
        fake(member.engine).hangs = False
    await asyncio.sleep(LIMIT_S / 2)
    assert not watch.done()
    assert [(member.fenced, member.suspect) for member in pool.members] == [(None, False)] * 3


@pytest.mark.parametrize("seconds", [0.3, 60.0], ids=["it swaps late", "it hangs"])
@asynchronous
async def test_requests_go_to_those_that_have_a_version_while_an_engine_does_not_take_it(seconds: float) -> None:
    busy = list[tuple[str, float, float]]()
    pool = Pool(handles(3), 8, 5.0, lambda *span: busy.append(span))
    slow, command = fake(pool.members[0].engine), fake(pool.members[0].engine).command_receivers

    async def swaps(*arguments: Any) -> None:
        await asyncio.sleep(seconds)
        await command(*arguments)

    slow.command_receivers = swaps  # type: ignore[method-assign, assignment]
    coordinator = coordinator_of(pool, timeout_s=30.0, pause_s=0.4)
    await coordinator.handle(WeightsStage(1))
    across = asyncio.create_task(pool.generate((1,), Sampling(1.0, 1_000_000, ())))
    committing, longest, salts = asyncio.create_task(coordinator.handle(WeightsCommit(1, update=1))), 0.0, set[int]()
    await asyncio.sleep(0)
    while not committing.done():
        begin = time.monotonic()
        salts.add((await asyncio.wait_for(pool.generate((1,), SAMPLING), 5.0)).salt)
        longest = max(longest, time.monotonic() - begin)
        await asyncio.sleep(0.001)
    await committing
    across.cancel()
    await asyncio.gather(across, return_exceptions=True)
    hung = seconds > 1.0
    assert [member.fenced is not None for member in pool.members] == [hung, False, False]
    assert [(member.version, member.waiting) for member in pool.members] == [(0, True) if hung else (1, False), (1, False), (1, False)]
    assert salts == {1}, "no prompt is cached under the version before"
    assert longest < min(seconds, 0.4), "requests do not wait for the late engine, nor for the limit of its pause"
    assert all(fake(member.engine).wrong == [] for member in pool.members)
    assert all(begin <= end for _, begin, end in busy)


def hearing(heard: list[int], live: bool) -> Any:
    """A listener that lets a response go on."""
    return SimpleNamespace(every=1, kept=None, live=live, hear=heard.extend, forget=heard.clear)


@asynchronous
async def test_the_requests_of_a_lost_engine_go_to_another() -> None:
    async def run(deaths: int, listener: Any = None, engines: int = 5) -> int:
        """Let the engine of one response die midway, a number of times in a row."""
        pool = Pool(handles(engines), 8, 5.0, lambda *_: None)
        asking = asyncio.create_task(pool.generate((1,), SAMPLING, listener=listener))
        for _ in range(deaths):
            while not any(member.in_flight and member.fenced is None for member in pool.members):
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            for member in pool.members:
                fake(member.engine).dead |= member.in_flight > 0
            await asyncio.sleep(0)
        answer = await asking
        assert sum(member.fenced is not None for member in pool.members) == deaths
        return len(answer.generation.tokens)

    assert await run(1) == SAMPLING.max_new_tokens
    assert await run(2) == SAMPLING.max_new_tokens
    with pytest.raises(TrajectoryRejected, match="engine_died"):
        await run(3)
    with pytest.raises(EngineError, match="no engine is left"):  # a rejection would start the group over when the run goes on
        await run(2, engines=2)
    heard = list[int]()
    assert await run(1, hearing(heard, live=False)) == len(heard), "what the lost engine had sampled is forgotten"
    with pytest.raises(TrajectoryRejected, match="engine_died"):
        await run(1, hearing([], live=True))


@asynchronous
async def test_a_connection_that_breaks_off_does_not_end_an_engine_that_answers() -> None:
    pool = Pool(handles(2), 8, 5.0, lambda *_: None)
    first = fake(pool.members[0].engine)
    whole = first.generate

    async def breaks_off(*arguments: Any, **named: Any) -> Generation:
        first.generate = whole  # type: ignore[method-assign]
        raise EngineLost("engine.0: /generate: Server disconnected")

    first.generate = breaks_off  # type: ignore[method-assign]
    assert len((await pool.generate((1,), SAMPLING)).generation.tokens) == SAMPLING.max_new_tokens
    assert [(member.fenced, member.suspect) for member in pool.members] == [(None, True), (None, False)]
    assert not first.dead


@asynchronous
async def test_an_engine_that_recovers_serves_again() -> None:
    pool = Pool(handles(1), 8, 0.2, lambda *_: None)
    engine = fake(pool.members[0].engine)
    engine.hangs = True
    with pytest.raises(TrajectoryRejected, match="engine_timeout"):
        await pool.generate((1,), SAMPLING)
    assert pool.members[0].suspect
    engine.hangs = False
    await pool.generate((1,), SAMPLING)  # the only engine, suspect or not
    assert not pool.members[0].suspect


@pytest.mark.parametrize("stood", [True, False])
@asynchronous
async def test_a_limit_that_runs_out_while_this_process_stands_still_is_no_engine_s_fault(stood: bool) -> None:
    """As after SIGSTOP and SIGCONT: the answers of the meantime wait to be read, and a request is sent again."""
    pool = Pool(handles(2), 8, 1.0, lambda *_: None)
    watching = asyncio.create_task(pool.watch())
    for member in pool.members:
        fake(member.engine).hangs = True
    asking = asyncio.create_task(pool.generate((1,), SAMPLING))
    await asyncio.sleep(0.2)
    if stood:
        time.sleep(2.5)
    else:
        await asyncio.sleep(0.6)
    for member in pool.members:
        fake(member.engine).hangs = not stood
    if stood:
        assert len((await asking).generation.tokens)
    else:
        with pytest.raises(TrajectoryRejected, match="engine_timeout"):
            await asking
    assert not watching.done()
