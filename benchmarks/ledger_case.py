"""One measurement of `benchmarks.ledger`, in a process whose CPU time and memory are those of a controller, or of a rollout worker."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from asyncmoe.config import Config, parse
from asyncmoe.engines.engine import Engine, EngineHandle
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import WaitTimeout
from asyncmoe.process import freeze
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.service import QueueRequest, QueueService
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.run_log import RunLog, WorkerLog
from asyncmoe.rollout.tasks import Demonstration, Prompt
from asyncmoe.rollout.workers.fleet import WorkerFleet
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.rpc.messages import Commit, Reply, Request
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.rpc.server import Server
from asyncmoe.rpc.worker_messages import WorkerJoin
from asyncmoe.trajectory import NOTHING, Buffer, Recording, Trajectory, encode_routes
from benchmarks.held import held as memory_of
from benchmarks.ledger_workers import over_tcp
from benchmarks.routes import ROUTING, drawn

_GROUP, _PROMPT = 8, 128
_LINE_S = 120.0


@dataclass(frozen=True)
class LedgerCase:
    """What is measured.

    Attributes:
        groups: of `_GROUP` trajectories, in a batch.
        steps: measured, after one that is not.
        engines: of all workers together.
        idle_s: seconds for which the controller is watched while nothing happens, after as many in which its queue fills up.
    """

    workers: int
    groups: int = 128
    steps: int = 4
    engines: int = 64
    idle_s: float = 5.0


@dataclass
class _Handle:
    """An engine that nobody asks anything."""

    name: str
    died: str | None = None
    host: str = ""
    tp: int = 1
    ep: int = 1
    client: Engine | None = None

    def kill(self) -> None:
        self.died = "killed"


class _Asks:
    """A prompt of 128 tokens for every group."""

    def prompt(self, group: int, stream: str = "episode") -> Prompt:
        return Prompt(str(group), tuple(range(_PROMPT)), "")

    def demonstration(self, index: int) -> Demonstration:
        raise NotImplementedError


class _Clock:
    """CPU time and time between the commit of the first step and that of the last."""

    def __init__(self, queue: BoundedQueue, steps: int, digest: str) -> None:
        self._queue, self._steps = queue, steps
        self._service = QueueService(queue, run="bench", config_digest=digest)
        self._begin = (0.0, 0.0)
        self.cpu_s = self.wall_s = 0.0

    async def answer(self, request: Request) -> Reply | tuple[Reply, list[Buffer]]:
        reply = await self._service(cast(QueueRequest, request))
        if isinstance(request, Commit):
            self._queue.set_version(request.step + 1)
            now = time.process_time(), time.monotonic()
            if request.step == 0:
                freeze()
                self._begin = now
            self.cpu_s, self.wall_s = now[0] - self._begin[0], now[1] - self._begin[1]
        return reply


def configured(folder: Path, workers: int, groups: int, size: int) -> Config:
    """Return the configuration of a run of so many groups a step."""
    (model := folder / "model").mkdir()
    return parse(
        {
            "run": {"dir": str(folder / "run"), "steps": 1000},
            "model": {"path": str(model)},
            "task": {"kind": "arithmetic"},
            "rollout": {"groups_per_step": groups, "group_size": size, "workers": workers},
            "queue": {"staleness": {"max_staleness": 1}},
            "engines": {"count": max(workers, 1)},
        }
    )


async def controller(case: LedgerCase, folder: Path) -> dict[str, Any]:
    """Return {"cpu_us_per_trajectory", "per_s" (trajectories), "cores" (of the controller meanwhile), "idle_cores" (while it waits)}."""
    config, batch = configured(folder, case.workers, case.groups, _GROUP), case.groups * _GROUP
    pool = Pool([cast(EngineHandle, _Handle(f"engine.{n}")) for n in range(case.engines)], 1 << 16, 60.0, lambda *_: None)
    run_log = RunLog.open(config, {"hidden_size": 8}, NOTHING)
    fleet = WorkerFleet(config, pool, lambda *_: None, run_log.for_workers, address_of=lambda _: ("http://10.0.0.1:30000", "k" * 40))
    queue = BoundedQueue(
        capacity=config.queue_capacity,
        batch=batch,
        group_size=_GROUP,
        max_staleness=1,
        on_freed=fleet.over,
        log=run_log.queue_log,
        resumed=await run_log.resume(0),
    )
    clock = _Clock(queue, case.steps, config.digest)
    producer = Producer(queue, _Asks(), fleet, _GROUP, queue_log=run_log.queue_log)
    command = [sys.executable, "-m", "benchmarks.ledger_workers", *map(str, (case.workers, case.steps + 1, batch))]
    pipe = asyncio.subprocess.PIPE
    other = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    async with Server(clock.answer) as server:
        rendezvous = over_tcp(await server.start())
        for number in range(1, case.workers + 1):
            serves = msgspec.json.decode(await _line(other), type=Rendezvous)
            await fleet.join(WorkerJoin(number, serves, "", config.digest))
        parts = [asyncio.create_task(part) for part in (server.serve(), fleet.run(), producer.run())]
        assert other.stdin is not None
        other.stdin.write(msgspec.json.encode(rendezvous) + b"\n")
        ended = asyncio.create_task(_line(other))
        done, _ = await asyncio.wait([*parts, ended], return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
        trained = queue.ledger.trained
        await asyncio.sleep(case.idle_s)  # the queue fills up to its bound
        spent, begin = time.process_time(), time.monotonic()
        await asyncio.sleep(case.idle_s)
        idle = (time.process_time() - spent) / (time.monotonic() - begin)
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        await fleet.close()
    other.stdin.close()
    with suppress(TimeoutError):
        await asyncio.wait_for(other.wait(), _LINE_S)
    await run_log.close()
    count = trained - batch
    return {
        "cpu_us_per_trajectory": round(1e6 * clock.cpu_s / count, 1),
        "per_s": round(count / clock.wall_s),
        "cores": round(clock.cpu_s / clock.wall_s, 2),
        "idle_cores": round(idle, 4),
    }


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    if not (line := await asyncio.wait_for(process.stdout.readline(), 10 * _LINE_S)):
        raise WaitTimeout("the workers that only answer", "a line; see what they wrote", 0.0)
    return line


async def held(count: int, tokens: int, folder: Path) -> dict[str, Any]:
    """Hold trajectories with routes as a rollout worker does, in the log too; return {"trajectories", "tokens", "MB_each"}."""
    recording = Recording(ROUTING, vocabulary=1 << 16)
    kept = WorkerLog.open(configured(folder, 1, 2, 2).log, folder, "bench", 1, {})
    worker = Worker(_never, 2, recording, kept)
    experts = np.ascontiguousarray(drawn(tokens - 1))
    await _add(worker, 0, experts, tokens)  # and what is needed once
    before = _resident()
    for number in range(1, count // 2 + 1):
        await _add(worker, number, experts, tokens)
    each = (_resident() - before) / (count // 2 * 2) / 1e6
    kept.close()
    return {"trajectories": count // 2 * 2, "tokens": tokens, "MB_each": round(each, 2)}


async def _never(prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
    raise NotImplementedError


async def _add(worker: Worker, number: int, experts: np.ndarray, tokens: int) -> None:
    made = []
    for episode in range(2):
        key = f"g{number}.e{episode}.a0.t0"
        mask = np.arange(tokens) >= _PROMPT
        made.append(
            Trajectory(
                key=key,
                group=number,
                episode=episode,
                tokens=np.arange(tokens, dtype=np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                reward=1.0,
                finish="length",
                routes=encode_routes(experts, ROUTING, key),
            )
        )
    await worker.hold(made, 0)


def _resident() -> int:
    gc.collect()
    return memory_of(os.getpid()).anonymous


def main(values: Mapping[str, Any]) -> dict[str, Any]:
    """Measure. `values`: {"case": of `LedgerCase`}, or {"held": number of trajectories, "tokens"}."""
    with tempfile.TemporaryDirectory() as folder:
        if "case" in values:
            return asyncio.run(controller(LedgerCase(**values["case"]), Path(folder)))
        return asyncio.run(held(values["held"], values["tokens"], Path(folder)))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
