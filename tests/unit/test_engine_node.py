"""The nodes of an engine, each a separate `asyncmoe engine`, join, serve, are lost, rejoin and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from asyncmoe.config import Config
from asyncmoe.engines import engine_agent
from asyncmoe.engines.membership import Membership
from asyncmoe.engines.nodes import NodePlace
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import AsyncmoeError
from asyncmoe.rpc import keys
from asyncmoe.rpc.messages import EngineOrder
from asyncmoe.rpc.server import Server
from tests.configs import demo
from tests.unit.fake_engine import FakeEngine
from tests.unit.test_engine_agent import Process

NAME = "engine.a"


class NodeProcess(Process):
    """A server of one node."""

    def __init__(self, place: NodePlace, seed: int) -> None:
        super().__init__(NAME)
        self.place, self.seed, self.stopped = place, seed, False

    async def stop(self) -> None:
        self.stopped = True
        self.kill()


class Rig:
    """A controller's membership, and the agents of an engine's nodes."""

    def __init__(self, config: Config, started: list[NodeProcess]) -> None:
        self.config, self.started = config, started
        self.agents: list[asyncio.Task[None]] = []
        self._work: list[asyncio.Task[None]] = []

    async def next_controller(self) -> None:
        """Start a controller that replaces the previous one."""
        await self.end_controller()
        self.pool = Pool([], 8, 5.0, lambda *_: None)
        self.membership = Membership(self.config, self.pool, lambda member: False, "c", AsyncMock())
        self._server = Server(self.membership.handle)  # type: ignore[arg-type]
        keys.write(self.config.run.dir, await self._server.start())
        self._work = [asyncio.create_task(self._server.serve()), asyncio.create_task(self.pool.watch())]

    async def end_controller(self) -> None:
        """End the controller, if there is one, without notice."""
        for task in self._work:
            task.cancel()
        if self._work:
            await asyncio.gather(*self._work, return_exceptions=True)
            await self._server.close()

    def agent(self, node: int) -> asyncio.Task[None]:
        self.agents.append(asyncio.create_task(engine_agent._serve(self.config, NAME, 0, (), node)))
        return self.agents[-1]

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.01)
            for agent in self.agents:
                if agent.done():
                    agent.result()

    def heard(self, node: int) -> float:
        """Return the monotonic time of a node's last message; 0 if it has not joined."""
        found = self.membership._gatherings._now.get(NAME)
        return found.seats[node].heard if found is not None and node in found.seats else 0.0

    def running(self) -> list[int]:
        return [process.place.node for process in self.started if not process.stopped]


Play = Callable[..., None]
"""Plays a scene, with further settings."""


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    settings = [
        "engines.join=true",
        "engines.tp=2",
        "engines.nodes=2",
        f"run.dir={tmp_path}",
        "cluster.heartbeat_timeout_s=6",
    ]
    started: list[NodeProcess] = []

    def start(*_: Any, place: NodePlace, seed: int, **__: Any) -> NodeProcess:
        started.append(NodeProcess(place, seed))
        return started[-1]

    monkeypatch.setattr(engine_agent.backend, "start", start)
    monkeypatch.setattr(engine_agent, "BACKOFF_S", 0.05)
    monkeypatch.setattr("asyncmoe.engines.membership.connect", lambda name, url, key: FakeEngine(name))

    async def play(scene: Callable[[Rig], Awaitable[None]], *more: str) -> None:
        made = Rig(demo(*settings, *more), started)
        await made.next_controller()
        try:
            async with asyncio.timeout(60):
                await scene(made)
        finally:
            for agent in made.agents:
                agent.cancel()
            await asyncio.gather(*made.agents, return_exceptions=True)
            await made.end_controller()

    return lambda *asked: asyncio.run(play(*asked))


def test_they_meet_serve_are_lost_come_again_and_end_with_the_run(rig: Play) -> None:
    async def scene(it: Rig) -> None:
        agents = [it.agent(1), it.agent(0)]
        for lost in (1, 0):
            await it.until(lambda: it.pool.present and len(it.running()) == 2)
            pair = it.started[-2:]
            assert sorted(process.place.node for process in pair) == [0, 1]
            assert len({(process.place.meeting, process.place.key) for process in pair}) == 1
            next(process for process in pair if process.place.node == lost).kill()
            await it.until(lambda pair=pair: all(process.stopped for process in pair))
        await it.until(lambda: it.pool.present and len(it.running()) == 2)
        assert len({process.place.meeting for process in it.started}) == 3, "a place to meet of its own each time"
        assert len({process.place.key for process in it.started}) == 3
        assert it.started[-1].seed == it.started[-2].seed == it.started[0].seed + 2
        await it.membership.end(EngineOrder(finished=True))
        await asyncio.gather(*agents)
        assert not it.running()

    rig(scene)


def test_one_that_never_comes_is_named_after_a_while(rig: Play) -> None:
    async def scene(it: Rig) -> None:
        with pytest.raises(AsyncmoeError, match=r" for node 1 of engine\.a: .* start asyncmoe engine --name engine\.a --node 1") as caught:
            await it.agent(0)
        assert "\n" not in str(caught.value)
        assert not it.started

    rig(scene, "engines.start_timeout_s=1")


def test_one_that_waits_and_all_that_serve_come_anew_at_the_next_controller(rig: Play) -> None:
    async def scene(it: Rig) -> None:
        it.agent(1)
        await it.until(lambda: it.heard(1))
        first = it.heard(1)
        await it.until(lambda: it.heard(1) > first)  # it asks again once it was answered
        await it.next_controller()
        it.agent(0)
        for started in (2, 4):
            await it.until(lambda: it.pool.present and len(it.running()) == 2)
            assert len(it.started) == started
            if started == 2:
                await it.next_controller()
        await it.membership.end(EngineOrder(finished=True))
        await asyncio.gather(*it.agents)

    rig(scene, "cluster.heartbeat_timeout_s=3")
