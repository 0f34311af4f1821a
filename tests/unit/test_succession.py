"""Engines of a lost controller continue with the next one, with their weights, or restart."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config import Config
from asyncmoe.engines import engine_agent, engine_stay
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.succession import Succession
from asyncmoe.engines.takeover import EngineWeights
from asyncmoe.errors import AsyncmoeError, ProtocolError
from asyncmoe.rollout.engine_lifecycle import EngineLifecycle
from asyncmoe.rpc import keys
from asyncmoe.rpc.messages import EngineJoin, EngineOrder, WeightsBegin, WeightsCommit, WeightsStage
from asyncmoe.rpc.server import Server
from asyncmoe.weights.coordinator.coordinator import WeightUpdateCoordinator
from asyncmoe.weights.coordinator.driver import UpdateDriver
from tests.configs import demo
from tests.unit.asynchronous import asynchronous, until
from tests.unit.fake_engine import FakeEngine
from tests.unit.test_engine_agent import Process


class Site:
    """Machines with an agent each; the servers that these started, by name, the newest last."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = ["engines.join=true", "engines.count=2", f"run.dir={folder}", "cluster.heartbeat_timeout_s=6", "engines.orphan_s=15"]
        self.config = demo(*settings)
        self.servers: dict[str, list[Process]] = {}
        self._agents: dict[str, asyncio.Task[None]] = {}
        monkeypatch.setattr(engine_agent.backend, "start", self._start)
        monkeypatch.setattr(engine_agent, "BACKOFF_S", 0.05)
        monkeypatch.setattr("asyncmoe.engines.membership.connect", lambda name, url, key: self.engine(name))

    def _start(self, name: str, *_: Any, **__: Any) -> Process:
        self.servers.setdefault(name, []).append(Process(name))
        return self.servers[name][-1]

    def engine(self, name: str) -> FakeEngine:
        client = self.servers[name][-1].client
        assert isinstance(client, FakeEngine)
        return client

    def agent(self, name: str) -> asyncio.Task[None]:
        if name not in self._agents:
            self._agents[name] = asyncio.create_task(engine_agent._serve(self.config, name, 0, ()))
        return self._agents[name]

    async def end(self) -> None:
        for agent in self._agents.values():
            agent.cancel()
        await self.ended()

    async def ended(self) -> list[BaseException | None]:
        return await asyncio.gather(*self._agents.values(), return_exceptions=True)


class Controller:
    """What a controller has to do with engines that join."""

    def __init__(self, config: Config) -> None:
        self.succession = Succession(config.run.dir)
        self.pool = Pool([], 4, 5.0, lambda *_: None)
        driver = UpdateDriver(self.pool, 5.0, lambda *_: None, note=self.succession.note)
        self.coordinator = WeightUpdateCoordinator(driver, lambda _: asyncio.sleep(0))
        self.coordinator.succeed(self.succession.epoch, self.succession.weights.landed)
        self.lifecycle = EngineLifecycle(config, self.pool, self.coordinator, self.succession)
        self.membership: Any = self.lifecycle.membership

    async def publish(self, version: int) -> None:
        await self.coordinator.handle(WeightsStage(version))
        await self.coordinator.handle(WeightsCommit(version, update=version))
        landed = EngineWeights(version, self.pool.lineage, True)
        await until(lambda: (left := self.succession._read()) is not None and left.weights == landed)

    @property
    def states(self) -> dict[str, tuple[int, bool]]:
        return {member.engine.name: (member.version, member.waiting) for member in self.pool.present}


@asynccontextmanager
async def controller(config: Config) -> AsyncIterator[Controller]:
    """Serve; at the end of the block it is lost without a word."""
    made = Controller(config)
    async with Server(made.membership.handle, here_only=True) as server:
        keys.write(config.run.dir, await server.start())
        work = [asyncio.create_task(one) for one in (server.serve(), made.lifecycle._start_all())]
        await work[1]
        try:
            yield made
        finally:
            work[0].cancel()
            await asyncio.gather(*work, return_exceptions=True)


@pytest.fixture
def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def scene(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine test with a site, whose agents end with it."""

    @asynchronous
    @functools.wraps(test)
    async def run(it: Site, **named: Any) -> None:
        try:
            await test(it, **named)
        finally:
            await it.end()

    return run


@scene
async def test_engines_go_on_with_the_next_controller_and_the_one_after_it(it: Site) -> None:
    for name in ("a", "b"):
        it.agent(name)
    async with controller(it.config) as first:
        await first.publish(3)
        left_over = first.succession
    async with controller(it.config) as second:
        assert second.states == {"a": (3, False), "b": (3, False)}
        assert second.succession.epoch == 2
        await second.publish(4)
    async with controller(it.config) as third:
        assert third.states == {"a": (4, False), "b": (4, False)}
        assert [len(started) for started in it.servers.values()] == [1, 1], "no server was started again"
        with pytest.raises(ProtocolError, match="controller 3 has replaced controller 1: this process is left over"):
            await left_over.note(EngineWeights(9, 0, True))
        assert not any(it.engine(name).wrong for name in ("a", "b"))
        await third.membership.end(EngineOrder(finished=True))
        assert await it.ended() == [None, None]


@scene
async def test_an_update_that_was_under_way_ends_with_what_each_engine_says_it_has(it: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        it.agent(name)
    async with controller(it.config) as first:
        await first.publish(3)
        await first.succession.note(EngineWeights(3, 0, True, "loading", 4, 0))
        for name in ("a", "b"):
            await it.engine(name).pause()
            await it.engine(name).begin_update()
        it.engine("a").version = 4
        end = it.engine("b").end_update

        async def end_late() -> None:
            await asyncio.sleep(0.5)
            await end()

        monkeypatch.setattr(it.engine("b"), "end_update", end_late)
    async with controller(it.config) as second:
        assert second.states == {"a": (4, False), "b": (3, False)}
        assert not any(it.engine(name).paused or it.engine(name).updating for name in ("a", "b"))
        await second.membership.end(EngineOrder(finished=True))


@scene
@pytest.mark.parametrize("opening", [WeightsStage(4, in_place=True), WeightsBegin(4)], ids=["in place", "by broadcast"])
async def test_engines_whose_parameters_were_being_written_start_again(it: Site, opening: WeightsStage | WeightsBegin) -> None:
    for name in ("a", "b"):
        it.agent(name)
    async with controller(it.config) as first:
        await first.publish(3)
        await first.coordinator.handle(opening)
    async with controller(it.config) as second:
        await until(lambda: second.states == {"a": (0, True), "b": (0, True)})
        assert [len(it.servers[name]) for name in ("a", "b")] == [2, 2]
        await second.membership.end(EngineOrder(finished=True))


@scene
async def test_one_of_an_earlier_controller_and_one_that_comes_too_late_start_again(it: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        it.agent(name)
    monkeypatch.setattr("asyncmoe.engines.membership._RETURN_S", 1.0)
    find = engine_stay.controller
    late = asyncio.Event()

    async def slow(run_dir: Path, wait_s: float, engine: Any = None) -> Any:
        if engine is not None and engine.name == "b":
            await late.wait()
        return await find(run_dir, wait_s, engine)

    monkeypatch.setattr(engine_stay, "controller", slow)
    async with controller(it.config) as first:
        await first.publish(3)
    async with controller(it.config) as second:
        assert second.states == {"a": (3, False)}, "the run goes on with one"
        late.set()
        await until(lambda: "b" in second.states)
        assert [len(it.servers[name]) for name in ("a", "b")] == [1, 2]
        assert second.states == {"a": (3, False), "b": (0, True)}
        it._start("c")
        stranger = EngineJoin("c", "", "", "", 1, 1, it.config.digest, served="another")
        with pytest.raises(AsyncmoeError, match="c did not serve the controller before this one"):
            await second.membership.handle(stranger)
        await second.membership.end(EngineOrder(finished=True))
