"""A real server with one hanging process: it accepts connections, but a probe gets no response until the process continues."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncmoe.engines.types import Sampling
from tests.engine.conftest import Rig, family

pytestmark = pytest.mark.engine


@contextmanager
def stopped(rig: Rig, part: str) -> Iterator[None]:
    """SIGSTOP a process of the server meanwhile."""
    (hung,) = family(rig.engine, part)
    hung.suspend()
    try:
        yield
    finally:
        hung.resume()


def test_an_idle_and_a_busy_engine_are_alive(rig: Rig) -> None:
    async def run() -> list[bool]:
        client = rig.engine.client
        idle = await client.alive(10.0)
        asking = asyncio.create_task(client.generate((5, 6, 7), Sampling(1.0, 200, ()), "0", 60.0))
        busy = await client.alive(10.0)
        await asking
        return [idle, busy]

    assert rig.run(run()) == [True, True]


def test_a_paused_engine_can_be_taken_over(rig: Rig) -> None:
    """A controller may be lost in the middle of an update; the next one must find the engine."""

    async def run() -> list[bool]:
        client = rig.engine.client
        await client.pause()
        paused = await client.ready()
        await client.resume()
        return [paused, await client.ready()]

    assert rig.run(run()) == [True, True]


def test_a_server_whose_scheduler_hangs_is_not(rig: Rig) -> None:
    client = rig.engine.client
    with stopped(rig, "sglang::scheduler"):
        assert rig.run(client.ready())
        assert not rig.run(client.alive(3.0))
    assert rig.run(client.alive(10.0))
