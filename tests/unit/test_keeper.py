"""The keeper of engines, over its real socket, with engines that are not SGLang; and the controllers that take these over."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, EngineError, ProtocolError
from asyncmoe.rollout.engines import backend, keeper
from asyncmoe.rollout.engines.keeper import Keeper
from asyncmoe.rollout.engines.kept import KeeperClient
from asyncmoe.rollout.engines.lifecycle import EngineLifecycle
from asyncmoe.rollout.engines.pool import Pool
from asyncmoe.rollout.engines.weight_updates.coordinator import WeightUpdateCoordinator
from asyncmoe.rpc.keeper_messages import EngineWeights, KeeperTake
from asyncmoe.rpc.messages import WeightsCommit, WeightsStage
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.server import Server
from asyncmoe.telemetry.processes import Recorded
from tests.unit.fake_engine import FakeEngine, FakeHandle


class Machine:
    """The engines that were started on a machine; `connect` finds them by their URL."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []
        self.engines: dict[str, FakeEngine] = {}

    def start(self, name: str, config: Config, index: int, run_dir: Path, *, key: str, seed: int, memory: tuple[str, ...]) -> Started:
        self.started.append((name, seed))
        made = Started(name, f"http://here:{len(self.started)}")
        self.engines[made.url] = made.client
        return made

    def connect(self, name: str, url: str, key: str) -> FakeEngine:
        return self.engines[url]


class Started(FakeHandle):
    def __init__(self, name: str, url: str) -> None:
        super().__init__(name)
        self.url = url

    async def wait_ready(self) -> None:
        if self.client.dead:
            raise EngineError(f"{self.name} did not start: it is dead")

    async def stop(self) -> None:
        self.client.dead = True


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(backend, "start", made.start)
    monkeypatch.setattr(backend, "connect", made.connect)
    return made


def config_of(tmp_path: Path, orphan_s: float = 60.0) -> Config:
    (tmp_path / "run").mkdir(exist_ok=True)
    values = {"run": {"dir": str(tmp_path / "run"), "steps": 8}, "model": {"path": "model"}, "task": {"kind": "arithmetic"}}
    return configuration.parse({**values, "engines": {"count": 2, "orphan_s": orphan_s}})


@contextmanager
def keeping(config: Config, runs: Callable[[Recorded], bool] = lambda process: True) -> Iterator[tuple[Future[None], Rendezvous]]:
    """A keeper in a thread, because a controller blocks its own loop while the keeper starts an engine; the end of its watch, and where it
    is."""
    where, watched = Future[Rendezvous](), Future[None]()
    over = threading.Event()

    async def serve() -> None:
        kept = Keeper(config, config.run.dir, os.getppid(), runs)
        async with Server(kept.answer) as server:
            where.set_result(await server.start())
            serving, watching = asyncio.create_task(server.serve()), asyncio.create_task(kept.watch())
            watching.add_done_callback(lambda _: watched.set_result(None))
            while not over.is_set():
                await asyncio.sleep(0.02)
            serving.cancel()
            watching.cancel()
            await asyncio.gather(serving, watching, return_exceptions=True)
            await kept.stop_all()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield watched, where.result(10)
    finally:
        over.set()
        thread.join()


def in_loop(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await body

    asyncio.run(bounded())


class Controller:
    """What a controller has to do with engines."""

    def __init__(self, config: Config, client: KeeperClient) -> None:
        self.client, self.engines = client, [client.engine(index) for index in range(2)]
        self.pool = Pool(self.engines, 4, 5.0, lambda *_: None)
        self.published: list[int] = []
        self.coordinator = WeightUpdateCoordinator(self.pool, 5.0, self._published, lambda *_: None, note=client.note)
        self.coordinator.succeed(client.epoch, client.weights.landed)
        self.lifecycle = EngineLifecycle(
            config, self.pool, list(self.engines), lambda index, _: client.start(index), self.coordinator, client
        )
        self.tasks: list[asyncio.Task[None]] = []

    async def _published(self, version: int) -> None:
        self.published.append(version)

    async def publish(self, version: int) -> None:
        await self.coordinator.handle(WeightsStage(version))
        await self.coordinator.handle(WeightsCommit(version, update=version))

    async def run(self) -> Controller:
        self.tasks = [asyncio.create_task(part) for part in self.lifecycle.parts()]
        await self.coordinator.wait_started()
        return self

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.client.close()

    @property
    def states(self) -> list[tuple[int, bool]]:
        return [(member.version, member.waiting) for member in self.pool.present]


async def controller(config: Config, at: Rendezvous) -> Controller:
    return await Controller(config, await asyncio.to_thread(KeeperClient, at, config)).run()


def test_the_next_controller_takes_over_the_engines_with_their_versions_and_the_last_one_is_refused(
    tmp_path: Path, machine: Machine
) -> None:
    config = config_of(tmp_path)

    async def body() -> None:
        with keeping(config) as (_, at):
            first = await controller(config, at)
            await first.publish(3)
            await asyncio.sleep(0.1)  # the note that it has landed
            second = await controller(config, at)
            assert second.states == [(3, False)] * 2
            assert machine.started == [("engine.0", 0), ("engine.1", 1)], "none was started again"
            with pytest.raises(ProtocolError, match="from controller 1 of these engines, expected controller 2, which has taken its place"):
                await first.publish(4)
            assert [engine.version for engine in machine.engines.values()] == [3, 3]
            await second.publish(4)
            assert [engine.version for engine in machine.engines.values()] == [4, 4]
            assert not any(engine.wrong for engine in machine.engines.values())
            await first.end()
            await second.end()

    in_loop(body())


def test_engines_that_are_paused_go_on_with_the_version_that_they_have_taken_or_held(tmp_path: Path, machine: Machine) -> None:
    config = config_of(tmp_path)

    async def body() -> None:
        with keeping(config) as (_, at):
            first = await controller(config, at)
            await first.publish(3)
            await asyncio.sleep(0.1)
            await first.client.note(EngineWeights(3, 0, True, "loading", 4, 0))
            new, old = machine.engines.values()
            for engine in (new, old):
                await engine.pause()
                await engine.begin_update()
            new.version = 4
            await first.end()
            second = await controller(config, at)
            assert second.states == [(4, False), (3, False)]
            assert not any(engine.paused or engine.updating for engine in (new, old))
            assert second.pool.version == 3, "the version under way is sent to both"
            await second.publish(4)
            assert second.states == [(4, False)] * 2
            await second.end()

    in_loop(body())


def test_an_engine_that_holds_one_of_two_versions_with_one_number_starts_again(tmp_path: Path, machine: Machine) -> None:
    config = config_of(tmp_path)

    async def body() -> None:
        with keeping(config) as (_, at):
            first = await controller(config, at)
            await first.publish(3)
            await asyncio.sleep(0.1)
            told: list[EngineWeights] = []
            first.coordinator.driver._note = told_to(told, first.client.note)
            first.pool.lineage = 1  # the trainer started again in place, and trains version 4 anew
            first.pool.members[0].version = machine.engines["http://here:1"].version = 4
            await first.coordinator.handle(WeightsStage(4))
            update = first.coordinator.driver.expect(4)
            await first.coordinator.driver.pause_all(update)
            assert told[-1] == EngineWeights(4, 0, True, "loading", 4, 1)
            await first.end()
            second = await controller(config, at)
            doubtful = second.pool.members[0]
            assert "engine.0 holds one of two versions 4, which was under way" in str(doubtful.fenced)
            assert [member.waiting for member in second.pool.present] == [True], "the other waits"
            await second.end()

    in_loop(body())


def told_to(
    told: list[EngineWeights], note: Callable[[EngineWeights], Coroutine[Any, Any, None]]
) -> Callable[..., Coroutine[Any, Any, None]]:
    async def both(weights: EngineWeights) -> None:
        told.append(weights)
        await note(weights)

    return both


def test_a_state_from_before_an_engine_started_again_is_not_taken_for_its_newest(tmp_path: Path, machine: Machine) -> None:
    config = config_of(tmp_path)

    async def body() -> None:
        with keeping(config) as (_, at):
            made = await controller(config, at)
            await made.client.stop(1)
            watching = asyncio.create_task(made.client.watch())
            await asyncio.sleep(0)  # it has asked
            engine = made.client.start(1)
            for _ in range(5):  # the answer to that reaches this loop after the engine's start
                await asyncio.sleep(0)
            assert engine.died is None
            watching.cancel()
            await made.end()

    in_loop(body())


def test_without_any_engine_to_go_on_they_start_again_at_once_with_other_seeds(tmp_path: Path, machine: Machine) -> None:
    config = config_of(tmp_path)

    async def body() -> None:
        with keeping(config) as (_, at):
            first = await controller(config, at)
            await first.publish(3)
            await first.client.note(EngineWeights(3, 0, True, "loading", 3, 1))
            await first.end()
            second = await controller(config, at)
            assert second.states == [(0, True)] * 2, "they wait for a version"
            assert machine.started == [("engine.0", 0), ("engine.1", 1), ("engine.0", 2), ("engine.1", 3)]
            await second.end()

    in_loop(body())


def test_an_engine_that_dies_is_seen_and_its_start_is_told(tmp_path: Path, machine: Machine) -> None:
    config = config_of(tmp_path)

    async def body() -> None:
        with keeping(config) as (_, at):
            made = await controller(config, at)
            machine.engines["http://here:2"].dead = True
            while made.engines[1].died is None:
                await asyncio.sleep(0.05)
            assert (made.engines[0].died, made.engines[1].died) == (None, "killed")
            await made.end()

    in_loop(body())


@pytest.mark.parametrize("returns", [False, True])
def test_engines_end_when_no_controller_has_come_in_time(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    config, alive = config_of(tmp_path, orphan_s=0.5), [True]
    monkeypatch.setattr(keeper, "_LOOK_S", 0.02)

    async def body() -> None:
        with keeping(config, lambda process: alive[0]) as (watched, at):
            made = await controller(config, at)
            await asyncio.sleep(0.7)
            assert not watched.done(), "it has a controller"
            alive[0] = False
            await asyncio.sleep(0.3)
            alive[0] = returns
            await asyncio.sleep(0.6)
            assert watched.done() is not returns
            await made.end()
        assert all(engine.dead for engine in machine.engines.values())

    in_loop(body())


def test_a_keeper_whose_launcher_ended_while_it_started_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    monkeypatch.setattr(keeper, "_LOOK_S", 0.02)
    with pytest.raises(AsyncmoeError, match="no controller for"):
        asyncio.run(asyncio.wait_for(Keeper(config_of(tmp_path, orphan_s=0.1), tmp_path / "run", ended.pid).watch(), 10))


def test_a_controller_of_another_configuration_gets_no_engines(tmp_path: Path, machine: Machine) -> None:
    config = config_of(tmp_path)

    async def body() -> None:
        with keeping(config) as (_, at), pytest.raises(ProtocolError, match="the engines that are kept have another configuration"):
            await asyncio.to_thread(KeeperClient, at, config_of(tmp_path, orphan_s=7.0))
        others = KeeperTake(config.digest, os.getpid(), {"NCCL_CUMEM_ENABLE": "1"})
        with pytest.raises(ProtocolError, match="or other settings of NCCL"):
            await Keeper(config, tmp_path / "run", os.getpid()).answer(others)

    in_loop(body())
