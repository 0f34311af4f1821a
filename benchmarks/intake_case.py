"""One case of `benchmarks.intake`, in a process with the CPU time and memory of a controller that receives generations."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any, cast

import msgspec
import numpy as np
import uvloop

from asyncmoe.engines.engine import EngineHandle
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.sglang.client import SGLangClient
from asyncmoe.engines.sglang.generation import request_body
from asyncmoe.engines.types import Sampling
from asyncmoe.process import freeze
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.environment import Bounds, Environment, Episode
from asyncmoe.rollout.episodes.environments.single_turn import SingleTurn
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tasks import Demonstration, Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.trajectory import Recording
from benchmarks.intake_server import VOCABULARY
from benchmarks.routes import ROUTING
from benchmarks.unlogged import Unlogged

_TIMEOUT_S = 600.0
_GROUP = 8


@dataclass(frozen=True)
class IntakeCase:
    """The parameters of a case.

    Attributes:
        kind: "rate", "agents", "queued" or "unfinished".
        in_flight: concurrent requests; for "queued" and "unfinished": the total number of trajectories.
        prompt, new: tokens of a prompt (for an agent: of the observation before each turn) and of a response.
        routes: whether experts are recorded.
        count: measured trajectories; before them, `in_flight` trajectories are not counted.
        turns: turns of each agent.
        watched: whether the lag of the event loop is measured, which takes a few percent of a core.
    """

    kind: str
    in_flight: int
    prompt: int = 128
    new: int = 1024
    routes: bool = True
    count: int = 0
    turns: int = 1
    watched: bool = True

    @property
    def recording(self) -> Recording:
        """The recorded data."""
        return Recording(ROUTING if self.routes else None, vocabulary=VOCABULARY)


class _Words:
    """A tokenizer that costs nothing, because tokenization is not measured."""

    vocabulary, eos = VOCABULARY, 0

    def encode(self, text: str) -> tuple[int, ...]:
        return (1,)

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


@dataclass(frozen=True)
class _Asks:
    """The same prompt for every group."""

    tokens: tuple[int, ...]

    def prompt(self, group: int, stream: str = "episode") -> Prompt:
        return Prompt("", self.tokens, "")

    def demonstration(self, index: int) -> Demonstration:
        raise NotImplementedError


@dataclass
class _Handle:
    """A stand-in's process, as the pool sees it."""

    name: str
    client: SGLangClient
    died: str | None = None
    host: str = ""
    tp: int = 1
    ep: int = 1

    def kill(self) -> None:
        self.died = "killed"


@dataclass
class _Lag:
    """The delay of a task that sleeps a millisecond, and the loop's computing time between two of its turns; milliseconds."""

    late: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        while True:
            begin, spent = time.monotonic(), time.thread_time()
            await asyncio.sleep(0.001)
            self.late.append((time.monotonic() - begin - 0.001) * 1e3)
            self.busy.append((time.thread_time() - spent) * 1e3)

    def figures(self) -> dict[str, float]:
        return {**_quantiles("lag_ms", self.late), **_quantiles("stretch_ms", self.busy)}


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    p50, p99, most = np.quantile(values, (0.5, 0.99, 1.0))
    return {f"{name}_p50": round(float(p50), 2), f"{name}_p99": round(float(p99), 2), f"{name}_max": round(float(most), 2)}


@dataclass
class _Agents:
    """Conversations of many turns; notes the CPU seconds of each turn."""

    seen: tuple[int, ...]
    turns: int
    spent: list[list[float]]

    async def run(self, episode: Episode) -> float:
        agent, each = episode.agent(), []
        for _ in range(self.turns):
            begin = time.process_time()
            agent.see(self.seen)
            await agent.respond()
            each.append(time.process_time() - begin)
        self.spent.append(each)
        return 0.0


@dataclass
class _Waits:
    """One response, after which the conversation waits forever."""

    over: asyncio.Event
    waiting: int = 0

    async def run(self, episode: Episode) -> float:
        agent = episode.agent()
        agent.see(episode.prompt.tokens)
        await agent.respond()
        self.waiting += 1
        await self.over.wait()
        return 0.0


class _Stage:
    """The controller's parts of one case."""

    def __init__(self, case: IntakeCase, ports: Sequence[int], environment: Environment) -> None:
        self.clients = [SGLangClient(f"engine.{i}", f"http://127.0.0.1:{port}", timeout_s=_TIMEOUT_S) for i, port in enumerate(ports)]
        handles = [_Handle(client.name, client) for client in self.clients]
        self.pool = Pool(cast("list[EngineHandle]", handles), case.in_flight, _TIMEOUT_S, lambda *_: None)
        sampling = Sampling(1.0, case.new, (), recording=case.recording)
        tokenizer, bounds = cast(Tokenizer, _Words()), Bounds(case.turns, 1 << 20)
        self.context = RolloutContext(self.pool, sampling, tokenizer, Exact(), environment=environment, bounds=bounds, timeout_s=_TIMEOUT_S)


@asynccontextmanager
async def _staged(case: IntakeCase, ports: Sequence[int], environment: Environment | None = None) -> Any:
    stage = _Stage(case, ports, environment or SingleTurn())
    try:
        yield stage
    finally:
        await asyncio.gather(*(client.close() for client in stage.clients))


@contextmanager
def _running(*parts: Any) -> Iterator[list[asyncio.Task[Any]]]:
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()


async def rate(case: IntakeCase, ports: Sequence[int]) -> dict[str, Any]:
    """Measure tokens per second of single-turn episodes, from request to the commit of the step they are trained in."""
    lag, prompt = _Lag(), tuple(range(10, 10 + case.prompt))
    async with _staged(case, ports) as stage:
        batch = min(64, case.in_flight // _GROUP * _GROUP)
        worker = Worker(partial(episode.run, stage.context), _GROUP, case.recording)
        law = Admission(batch, case.in_flight // batch + 1, rule="downweight", drop_above=1 << 30)  # the stand-ins serve version 0 for ever
        queue = BoundedQueue(law, Unlogged(), capacity=case.in_flight + 4 * batch, group_size=_GROUP, on_freed=worker.forget)
        producer = Producer(queue, _Asks(prompt), worker, _GROUP)
        freeze()
        with _running(producer.run()) as (producing,):
            step = await _train(queue, 0, case.in_flight, batch, producing)
            with _running(*([lag.watch()] if case.watched else [])):
                begin, spent = time.monotonic(), time.process_time()
                first, step = step, await _train(queue, step, case.count, batch, producing)
                wall, cpu = time.monotonic() - begin, time.process_time() - spent
                while case.watched and not lag.late:  # so short a case that nothing was noted yet
                    await asyncio.sleep(0.001)
        with suppress(asyncio.CancelledError):
            await producing
    tokens = (step - first) * batch * case.new
    return {
        "tokens_per_cpu_s": round(tokens / cpu),
        "tokens_per_s": round(tokens / wall),
        "cores": round(cpu / wall, 2),
        "cpu_ms_per_trajectory": round(1e3 * cpu * case.new / tokens, 3),
        **(lag.figures() if case.watched else {}),
    }


async def _train(queue: BoundedQueue, step: int, count: int, batch: int, producing: asyncio.Task[Any]) -> int:
    """Lease and commit `count` trajectories; return the next step."""
    for now in range(step, step + -(-count // batch)):
        leased = await queue.lease(now, "rl", batch, now, _TIMEOUT_S)
        if producing.done() or len(leased.items) != batch:
            producing.result()
            raise RuntimeError(f"got {len(leased.items)} trajectories, expected {batch}")
        queue.commit(now)
        queue.set_version(now + 1)
    return step + -(-count // batch)


async def agents(case: IntakeCase, ports: Sequence[int]) -> dict[str, Any]:
    """Measure the CPU time of turns, one conversation at a time, minus the time to encode a request of the same length."""
    environment = _Agents(tuple(range(10, 10 + case.prompt)), case.turns, [])
    async with _staged(case, ports, environment) as stage:
        freeze()
        for number in range(case.count + 1):
            await episode.run(stage.context, Prompt("", (), ""), EpisodeId(number, 0, 0))
    each = [median(spent[k] for spent in environment.spent[1:]) * 1e3 for k in range(case.turns)]
    encoding = [_encoding_ms(case, case.prompt + k * (case.prompt + case.new)) for k in range(case.turns)]
    net = [spent - encoded for spent, encoded in zip(each, encoding, strict=True)]
    few = min(10, case.turns)
    return {
        "turn_ms_first": round(fmean(net[:few]), 3),
        "turn_ms_last": round(fmean(net[-few:]), 3),
        "last_to_first": round(fmean(net[-few:]) / fmean(net[:few]), 3),
        "request_ms_first": round(fmean(encoding[:few]), 3),
        "request_ms_last": round(fmean(encoding[-few:]), 3),
    }


def _encoding_ms(case: IntakeCase, tokens: int) -> float:
    asked, sampling = np.arange(10, 10 + tokens, dtype=np.int32), Sampling(1.0, case.new, (), recording=case.recording)
    spent = []
    for _ in range(9):
        begin = time.thread_time()
        msgspec.json.encode(request_body(asked, sampling, "0", 0, None))
        spent.append(time.thread_time() - begin)
    return median(spent) * 1e3


async def queued(case: IntakeCase, ports: Sequence[int]) -> dict[str, Any]:
    """Measure the memory of trajectories that wait in the queue."""
    async with _staged(case, ports) as stage:
        count = case.in_flight // _GROUP * _GROUP
        queue = BoundedQueue(Admission(count, 1), Unlogged(), capacity=count, group_size=_GROUP)
        await episode.run(stage.context, Prompt("", tuple(range(case.prompt)), ""), EpisodeId(1 << 20, 0, 0))
        before = _resident()
        play = partial(episode.run, stage.context)
        worker = Worker(play, _GROUP, case.recording)

        async def group(number: int) -> None:
            queue.started(_GROUP)
            prompt = Prompt("", tuple(range(case.prompt)), "")
            made = [await play(prompt, EpisodeId(number, member, 0)) for member in range(_GROUP)]
            await queue.put(await worker.hold([trajectory for one in made for trajectory in one], 1))

        for number in range(count // _GROUP):
            await group(number)
        return {"trajectories": count, "MB_each": round((_resident() - before) / count / 1e6, 2)}


async def unfinished(case: IntakeCase, ports: Sequence[int]) -> dict[str, Any]:
    """Measure the memory of conversations that wait after a long response."""
    environment = _Waits(asyncio.Event())
    async with _staged(case, ports, environment) as stage:
        prompt = Prompt("", tuple(range(case.prompt)), "")

        def play(number: int) -> asyncio.Task[Any]:
            return asyncio.create_task(episode.run(stage.context, prompt, EpisodeId(number, 0, 0)))

        tasks = [play(0)]
        while environment.waiting < 1:
            await asyncio.sleep(0.01)
        before = _resident()
        for number in range(1, case.in_flight + 1):
            tasks.append(play(number))
            while environment.waiting <= number:
                await asyncio.sleep(0.01)
        each = (_resident() - before) / case.in_flight / 1e6
        environment.over.set()
        await asyncio.gather(*tasks)
    return {"trajectories": case.in_flight, "MB_each": round(each, 2)}


def _resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(values: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one case. `values`: {"case": fields of `IntakeCase`, "ports": the stand-ins' ports}."""
    case = IntakeCase(**values["case"])
    measured = {"rate": rate, "agents": agents, "queued": queued, "unfinished": unfinished}[case.kind]
    return uvloop.run(measured(case, values["ports"]))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
