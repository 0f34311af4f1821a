"""A trainer that is lost and restarted, with a real controller and log, and stand-in engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from asyncmoe import models
from asyncmoe.checkpoints import Retention, directories
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, ConfigError, ProtocolError
from asyncmoe.log.room import Room
from asyncmoe.rollout import parts
from asyncmoe.rollout.controller import Controller
from asyncmoe.rollout.recorder import Recorder
from asyncmoe.rollout.run_log import RunLog
from asyncmoe.rollout.workers.fleet import WorkerFleet
from asyncmoe.rollout.workers.process import WorkerProcesses
from asyncmoe.rpc import messages
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.server import Server
from tests.configs import minimal
from tests.unit.asynchronous import asynchronous, until
from tests.unit.fake_engine import FakeEngine, FakeHandle
from tests.unit.test_checkpoints import saved
from tests.unit.worker_fleet import lent

RANKS = 2


def config_of(model: Path, run_dir: Path, **more: Any) -> Config:
    sections = {
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_new_tokens": 4},
        "queue": {"staleness": {"max_staleness": 1}},
        "keep": {"routing": "off"},
        "engines": {"count": 2},
        "sync": {"timeout_s": 20.0},
        "telemetry": {"samples": {"groups": 0}},
    }
    return minimal(run_dir, model, 8, **{**sections, **more})


@dataclass
class Running:
    """A controller that serves, its engines, and where it is."""

    config: Config
    engines: list[FakeEngine]
    rendezvous: Rendezvous
    serving: asyncio.Task[None]
    clients: list[Client] = field(default_factory=list)

    def trainer(self, epoch: int, config: Config | None = None) -> StandIn:
        ranks = [Client(self.rendezvous, f"trainer.{rank}", epoch) for rank in range(RANKS)]
        self.clients += ranks
        return StandIn(config or self.config, ranks)


@dataclass
class StandIn:
    """The requests of a trainer's ranks, in their order; no weights are trained or moved.

    Attributes:
        batches: those that it trained on, by step.
    """

    config: Config
    ranks: list[Client]
    step: int = 0
    updates: int = 0
    batches: dict[int, messages.Leased] = field(default_factory=dict)

    async def ask(self, request: messages.Request, rank: int = 0) -> messages.Reply:
        return (await asyncio.to_thread(self.ranks[rank].ask, request, 30.0))[0]

    async def of_all(self, request_of: Callable[[int], messages.Request]) -> list[messages.Reply]:
        """Every rank asks; returns, or raises the first error, when all have their answer: a client that waits in a thread may not be
        closed, which zmq ends the process for."""
        said = await asyncio.gather(*(self.ask(request_of(rank), rank) for rank in range(RANKS)), return_exceptions=True)
        for one in said:
            if isinstance(one, BaseException):
                raise one
        return [one for one in said if not isinstance(one, BaseException)]

    async def hello(self, step: int) -> messages.Welcome:
        self.step, digests = step, (self.config.digest, self.config.digest_without_layout)
        said = await self.of_all(lambda rank: messages.Hello(rank, RANKS, digests[0], step, None, digests[1]))
        assert isinstance(said[0], messages.Welcome)
        assert said[0] == said[1]
        return said[0]

    async def lease(self, wait_s: float = 20.0) -> messages.Leased:
        asked = messages.Lease(self.step, "rl", self.config.rollout.batch, self.step, wait_s)
        said = await self.of_all(lambda rank: asked)
        assert said[0] == said[1]
        return said[0]

    async def train(self) -> messages.Leased:
        leased = await self.lease()
        assert leased.items
        assert isinstance(await self.ask(messages.FindWorker(1, 5.0)), messages.WorkerFound)
        await self.of_all(lambda rank: messages.Commit(self.step))
        self.batches[self.step] = leased
        self.step += 1
        return leased

    async def publish(self) -> None:
        engines = await self.ask(messages.EnginesAsk(10.0))
        assert isinstance(engines, messages.Engines)
        self.updates += 1
        await self.ask(messages.WeightsStage(self.step))
        await self.ask(messages.WeightsCommit(self.step, update=self.updates))

    async def goodbye(self, finished: bool = True) -> None:
        await self.of_all(lambda rank: messages.Goodbye(rank, finished))


@asynccontextmanager
async def controller(config: Config) -> AsyncIterator[Running]:
    loaded = parts.load(config)
    config.run.dir.mkdir(parents=True, exist_ok=True)
    run_log = RunLog.open(config, models.recording(config, models.hf_config_of(config)))
    made = Controller(config, Recorder(config.run.dir), loaded, run_log)
    joined = [made._pool.join(FakeHandle(f"engine.{index}")) for index in range(config.engines.count)]
    worker = lent(config, loaded, made)
    async with Server(made.answer) as server:
        fakes = [member.engine.client for member in joined if isinstance(member.engine.client, FakeEngine)]
        rendezvous = await server.start()
        serving = asyncio.create_task(made.run(server, WorkerProcesses(config, config.run.dir)))
        await worker.join()
        running = Running(config, fakes, rendezvous, serving)
        try:
            yield running
        finally:
            for client in running.clients:
                client.close()
            if not serving.done():
                made._over.set()
            try:
                await serving
            finally:
                await worker.kill()
                run_log.queue_log.close()
                await loaded.close()


def keys(leased: messages.Leased) -> list[str]:
    return [item.key for item in leased.items]


async def refused(asked: Coroutine[Any, Any, messages.Reply]) -> None:
    with pytest.raises(ProtocolError, match="has taken its place: this process is left over and must end"):
        await asked


@asynchronous
@pytest.mark.parametrize("opening", [messages.WeightsBegin(4), messages.WeightsStage(4)])
async def test_it_is_given_its_batches_again_and_the_lost_one_changes_nothing_when_it_wakes_up(
    model: Path, tmp_path: Path, opening: messages.WeightsBegin | messages.WeightsStage
) -> None:
    async with controller(config_of(model, tmp_path / "run")) as running:
        first = running.trainer(0)
        assert (await first.hello(0)).version == 0
        await first.publish()
        for _ in range(4):
            await first.train()
            await first.publish()
        first.batches[4] = await first.lease()
        await first.ask(opening)
        assert [engine.paused for engine in running.engines] == [isinstance(opening, messages.WeightsBegin)] * 2  # it is lost now

        second = running.trainer(1)
        with pytest.raises(ProtocolError, match="sent before Hello by the trainer started as number 1"):
            await second.ask(messages.Commit(4))
        assert (await second.hello(2)).version == 4
        assert not any(engine.paused or engine.updating for engine in running.engines)
        digest = first.config.digest
        for request in (
            messages.Hello(0, RANKS, digest, 4, None, first.config.digest_without_layout),
            messages.Commit(4),
            messages.FindWorker(1, 0.0),
            messages.Saved(4),
            messages.WeightsStage(4),
            messages.EnginesAsk(1.0),
            messages.Goodbye(0, True),
            messages.Lease(4, "rl", 4, 4, 1.0),
        ):
            await refused(first.ask(request))
        for step in (2, 3, 4):
            if step == 4:
                await second.publish()  # it has caught up with the engines
            again = await second.train()
            assert (again.items, again.lineage, again.replayed) == (first.batches[step].items, 1, True)
        await second.publish()
        await second.train()
        new = await second.train()
        assert not new.replayed
        everything = [*first.batches.values(), second.batches[5], new]
        trained = [key for leased in everything for key in keys(leased)]
        assert len(trained) == len(set(trained)) == 7 * running.config.rollout.batch
        assert [engine.version for engine in running.engines] == [5, 5]
        assert [engine.wrong for engine in running.engines] == [[], []]
        await second.goodbye()


@asynchronous
async def test_one_that_is_lost_while_engines_hold_part_of_a_version_ends_the_run_with_that_cause(model: Path, tmp_path: Path) -> None:
    """They are fenced. By this method the trainer could not send its weights to engines that start again."""

    async def body() -> None:
        async with controller(config_of(model, tmp_path / "run", sync={"method": "broadcast"})) as running:
            first = running.trainer(0)
            await first.hello(0)
            await first.ask(messages.EnginesAsk(10.0))
            await first.ask(messages.WeightsBegin(0))
            await first.ask(messages.WeightsBucket(0, ("w",), ("float32",), ((1,),)))
            await running.trainer(1).hello(0)
            await running.serving

    with pytest.raises(AsyncmoeError, match=r"no engine is left: .*it may hold part of version 0: the trainer was lost"):
        await body()


@asynchronous
async def test_another_layout_may_come_and_another_configuration_may_not(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path / "run")
    async with controller(config) as running:
        await running.trainer(0).hello(0)
        other = config_of(model, tmp_path / "run", trainer={"optimizer": {"lr": 1.0}})
        with pytest.raises(ConfigError, match="configuration of the trainer"):
            await running.trainer(1, other).hello(0)
        await running.trainer(1, config_of(model, tmp_path / "run", trainer={"ranks": 2, "tp": 2})).hello(0)
        with pytest.raises(ProtocolError, match="has taken 3 steps, the controller counts 0"):
            await running.trainer(2).hello(3)


@asynchronous
async def test_a_log_without_room_records_less_while_the_run_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncmoe.rollout.controller._RECORD_S", 0.02)
    config, told = config_of(model, tmp_path / "run", log={"keep": "all"}), list[object]()
    async with controller(config) as running:
        trainer = running.trainer(0)
        await trainer.hello(0)
        await trainer.publish()
        for step in range(1, 7):
            await trainer.train()
            await trainer.publish()
            if step % 2 == 0:
                saved(config.run.dir, step, asked=Retention.of(config), files={"x": b"x"})
                await trainer.ask(messages.Saved(step))
        assert directories.window_begins(config.run.dir) == 0
        monkeypatch.setattr(WorkerFleet, "retain", lambda _, needed: told.append(needed))
        monkeypatch.setattr("asyncmoe.log.files.room", lambda *_: Room(0, 0, 1 << 30))
        await until(lambda: told)
        assert directories.window_begins(config.run.dir) == 4
        await trainer.train()
        await trainer.goodbye()
