"""Rollout workers, a controller and a trainer's rank in one process: real sockets, queue and log around engines that only count."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncmoe.config import Config
from asyncmoe.engines.engine import Engine
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.types import Generation, Sampling
from asyncmoe.errors import AsyncmoeError, TrajectoryRejected
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.service import QueueService
from asyncmoe.rollout.controller import Controller
from asyncmoe.rollout.episodes.environments.single_turn import SingleTurn
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.run_log import RunLog
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.workers.engines import Connect
from asyncmoe.rollout.workers.fleet import WorkerFleet
from asyncmoe.rollout.workers.service import WorkerService
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import Commit, FindWorker, Leased
from asyncmoe.rpc.server import Server
from asyncmoe.rpc.worker_messages import WorkerJoin
from asyncmoe.trainer.data import held
from asyncmoe.trajectory import NOTHING, Trajectory, decode, frames_in
from tests.configs import minimal
from tests.unit import openai_policy
from tests.unit.asynchronous import until
from tests.unit.fake_engine import FakeEngine, FakeHandle
from tests.unit.test_producer import Numbers

SIZE, GROUPS = 2, 2
BATCH = SIZE * GROUPS


class SlowEngine(FakeEngine):
    """Takes a random time for a response, and fails now and then."""

    def __init__(self, name: str, draw: random.Random) -> None:
        super().__init__(name)
        self._draw = draw

    async def generate(self, tokens: Any, sampling: Sampling, *rest: Any, **more: Any) -> Generation:
        await asyncio.sleep(self._draw.random() * 0.01)
        if self._draw.random() < 0.02:
            raise TrajectoryRejected("environment_error", "a response went wrong")
        short = replace(sampling, max_new_tokens=self._draw.randint(1, 5))
        made = await super().generate(tokens, short, *rest, **more)
        return replace(made, tokens=np.full(len(made.tokens), 7, np.int32), finish="stop")


class Lent:
    """One worker and its server."""

    def __init__(self, config: Config, number: int, loaded: RolloutParts, connect: Connect, fleet: WorkerFleet) -> None:
        self.worker = WorkerService(config, number, loaded, NOTHING, connect)
        self.server = Server(self.worker.answer, here_only=True)
        self._serving: asyncio.Task[None] | None = None
        self._number, self._digest, self._fleet = number, config.digest, fleet

    async def join(self) -> None:
        rendezvous = await self.server.start()
        self._serving = asyncio.create_task(self.server.serve())
        await self._fleet.join(WorkerJoin(self._number, rendezvous, self._digest))

    async def kill(self) -> None:
        """End it as a kill does: what it had handed to the disk stays, and nobody hears of the rest."""
        self._serving.cancel()
        with suppress(asyncio.CancelledError):
            await self._serving
        await self.server.close()
        await self.worker.close()


def lent(config: Config, loaded: RolloutParts, controller: Controller) -> Lent:
    """Return the worker of a controller whose engines are `FakeHandle`s; it joins when `join` is called."""
    pool, fleet = controller._pool, controller._fleet

    def connect(name: str, url: str, key: str) -> Engine:
        return next(member.engine.client for member in pool.present if member.engine.name == name)

    return Lent(config, 1, loaded, connect, fleet)


class Cluster:
    """A run of `workers` rollout workers. Use it as an async context."""

    def __init__(self, folder: Path, workers: int, engines: int, seed: int, staleness: int = 1) -> None:
        (model := folder / "model").mkdir(parents=True, exist_ok=True)
        self.draw = random.Random(seed)
        self.config = configured(folder, workers, staleness)
        self.parts = RolloutParts(openai_policy.tokenizer(model), Numbers(), (), Exact(), SingleTurn())  # type: ignore[arg-type]
        self.handles = [FakeHandle(f"engine.{number}") for number in range(engines)]
        for handle in self.handles:
            handle.client = SlowEngine(handle.name, self.draw)
        self.pool = Pool(self.handles, 64, 30.0, lambda *_: None)
        self.run_log = RunLog.open(self.config, NOTHING)
        self.fleet: WorkerFleet
        self.queue: BoundedQueue
        self.lent: dict[int, Lent] = {}
        self.trained: dict[int, list[Trajectory]] = {}
        self.failure: list[BaseException] = []

    def connect(self, name: str, url: str, key: str) -> FakeEngine:
        return next(handle.client for handle in self.handles if handle.name == name)

    async def __aenter__(self) -> Cluster:
        config = self.config
        self.fleet = WorkerFleet(config, self.pool, lambda *_: None, self.run_log.for_workers)
        resumed, queued = await self.run_log.resume(0)
        self.queue = BoundedQueue(
            Admission(BATCH, config.queue.staleness.max_staleness, rule="requeue"),
            self.run_log.queue_log,
            capacity=config.queue_capacity,
            group_size=SIZE,
            on_freed=self.fleet.forget,
            resumed=resumed,
            queued=queued,
        )
        service = QueueService(self.queue, config_digest=config.digest)

        async def answer(request: Any) -> Any:
            return await (self.fleet.find(request) if isinstance(request, FindWorker) else service(request))

        self.server = Server(answer, here_only=True)
        self._rendezvous = await self.server.start()
        producer = Producer(self.queue, self.parts.training, self.fleet, SIZE, start_over=frozenset({"environment_error"}))
        work = (self.server.serve(), self.fleet.run(), producer.run())
        self._tasks = [asyncio.create_task(self._guard(part)) for part in work]
        await asyncio.gather(*(self.start(number) for number in range(1, config.rollout.workers + 1)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fleet.close()
        for lent in self.lent.values():
            await lent.kill()
        await self.server.close()
        self.run_log.queue_log.close()

    async def start(self, number: int) -> None:
        self.lent[number] = Lent(self.config, number, self.parts, self.connect, self.fleet)
        await self.lent[number].join()

    def hang(self, hangs: bool) -> None:
        """Have all engines sample nothing, or go on."""
        for handle in self.handles:
            handle.client.hangs = hangs

    async def lose(self, number: int) -> None:
        await self.lent.pop(number).kill()

    async def lost(self, number: int) -> str:
        """Why a worker is lost, once it is."""
        await until(lambda: self.fleet._workers[number].gone)
        return self.fleet._workers[number].gone

    async def train(self, step: int) -> Leased:
        """Lease, fetch from whoever holds it, and commit a step; then publish the next version."""
        leased: Leased = await self._within(self.queue.lease(step, "rl", BATCH, step, 20.0))
        assert leased.items, "no batch came"
        keys = tuple(item.key for item in leased.items)
        frames = await self._within(asyncio.to_thread(self.fetched, leased))
        each = frames_in(1)
        self.trained[step] = [decode(frames[n * each : (n + 1) * each]) for n in range(len(keys))]
        assert [one.key for one in self.trained[step]] == list(keys)
        self.queue.commit(Commit(step).step)
        await self.publish(step + 1)
        return leased

    def fetched(self, leased: Leased) -> Any:
        with closing(Client(self._rendezvous, "trainer.0")) as client:
            return held.fetch(client, leased.items, None, True)

    async def publish(self, version: int) -> None:
        """Have all engines serve a version, as the coordinator does."""
        self.pool.hold()
        await self.pool.held()
        for member in self.pool.present:
            engine = self.connect(member.engine.name, "", "")
            engine.version = version
            member.serve(version, 0)
        self.queue.set_version(version)
        self.pool.release()

    async def _within(self, part: Any) -> Any:
        """Await a part; if another part of the run fails meanwhile, raise that."""
        task = asyncio.ensure_future(part)
        while not task.done():
            await asyncio.wait([task], timeout=0.05)
            if self.failure:
                task.cancel()
                raise self.failure[0]
        return task.result()

    async def _guard(self, part: Any) -> None:
        try:
            await part
        except (AsyncmoeError, AssertionError, RuntimeError) as error:
            self.failure.append(error)


def clustered(**of: int) -> Callable[[Callable[[Cluster], Awaitable[None]]], Callable[[Path], None]]:
    """Decorate a test that has a run of workers."""

    def decorated(test: Callable[[Cluster], Awaitable[None]]) -> Callable[[Path], None]:
        async def body(folder: Path) -> None:
            async with Cluster(folder, **of) as cluster:
                await test(cluster)

        def in_cluster(tmp_path: Path) -> None:
            asyncio.run(body(tmp_path))

        return in_cluster

    return decorated


def configured(folder: Path, workers: int, staleness: int) -> Config:
    rollout = {"groups_per_step": GROUPS, "group_size": SIZE, "workers": workers}
    queue = {"staleness": {"max_staleness": staleness}}
    return minimal(folder / "run", folder / "model", 100, rollout=rollout, queue=queue, engines={"count": 4})
