"""A real server of which one process hangs: it accepts connections, but a probe hears nothing until the process goes on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from asyncmoe.engines.liveness import Liveness
from asyncmoe.engines.types import Sampling
from tests.engine.conftest import Rig

pytestmark = pytest.mark.engine


def process(rig: Rig, part: str) -> psutil.Process:
    """The process of the server whose title has `part` in it."""
    family = psutil.Process(rig.engine._child.pid).children(recursive=True)
    (found,) = [one for one in family if part in " ".join(one.cmdline())]
    return found


@contextmanager
def stopped(rig: Rig, part: str) -> Iterator[None]:
    """SIGSTOP a process of the server meanwhile."""
    hung = process(rig, part)
    hung.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        hung.send_signal(signal.SIGCONT)


def test_an_idle_and_a_busy_engine_are_alive(rig: Rig) -> None:
    async def run() -> list[bool]:
        client = rig.engine.client
        idle = await client.alive(10.0)
        asking = asyncio.create_task(client.generate((5, 6, 7), Sampling(1.0, 200, ()), "0", 60.0))
        busy = await client.alive(10.0)
        await asking
        return [idle, busy]

    assert rig.run(run()) == [True, True]


def test_a_server_whose_scheduler_hangs_is_not(rig: Rig) -> None:
    client = rig.engine.client
    with stopped(rig, "sglang::scheduler"):
        assert rig.run(client.ready())
        assert not rig.run(client.alive(3.0))
    assert rig.run(client.alive(10.0))


def test_a_pool_suspects_it_and_trusts_it_again(rig: Rig) -> None:
    async def run() -> list[bool]:
        member, seen = rig.pool.members[0], []
        watch = asyncio.create_task(Liveness(rig.pool, 24.0, lambda member: False).run())
        with stopped(rig, "sglang::scheduler"):
            await asyncio.sleep(6.0)
            seen.append(member.suspect)
        await rig.pool.generate((5, 6, 7), Sampling(1.0, 4, ()))
        seen.append(member.suspect)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        return seen

    assert rig.run(run()) == [True, False]
    assert rig.pool.members[0].fenced is None


@pytest.mark.thorough
def test_a_server_that_lost_its_detokenizer_is_fenced(make_rig: Callable[..., Rig]) -> None:
    rig, limit_s = make_rig(1, 2), 18.0
    process(rig, "sglang::detokenizer").kill()

    async def run() -> float:
        begin, (member,) = time.monotonic(), rig.pool.members
        watch = asyncio.create_task(Liveness(rig.pool, limit_s, lambda member: False).run())
        while member.fenced is None and time.monotonic() < begin + 3 * limit_s:
            rig.pool.fence_dead()
            await asyncio.sleep(0.1)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        return time.monotonic() - begin

    took = rig.run(run())
    assert rig.pool.members[0].fenced is not None
    assert took < 1.5 * limit_s
