"""One real SGLang server for all tests of this folder, and one event loop for everything that uses it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.engines.adapters import asked
from asyncmoe.engines.pool import Pool, PooledGeneration
from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.engines.types import Sampling
from asyncmoe.models import load_hf_config
from asyncmoe.models.make import VOCAB, make_model
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tasks.order import DrawnTask
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.rpc import keys
from asyncmoe.rpc.messages import Reply, Request
from asyncmoe.rpc.server import Server
from asyncmoe.trajectory import Recording, Routing, Trajectory
from asyncmoe.weights.coordinator.coordinator import WeightUpdateCoordinator
from asyncmoe.weights.coordinator.driver import UpdateDriver
from tests.checksums import engine_checksums
from tests.configs import minimal
from tests.engine.oracle import Oracle, largest_difference
from tests.engine.sender import Sender
from tests.ranks import launch
from tests.system.runs import command_line, wait_for

KEY = "key-of-the-tests"
"""API key of the servers that tests talk to without the client."""
PROMPT = (30, 40, 50, 60, 70)
ROUTING = Routing(all_layers=4, layers=(0, 1, 2, 3), top_k=2, experts=8)
RECORDING = Recording(ROUTING, masks=True, vocabulary=VOCAB)
"""Of the model that tests share."""


Answer = Callable[[Request], Awaitable[Reply]]


@dataclass
class Rig:
    """A pool of engines, its coordinator, and their records."""

    config: Config
    engines: list[SGLangProcess]
    pool: Pool
    coordinator: WeightUpdateCoordinator
    sender: Sender
    run: Callable[..., Any]
    """Runs a coroutine to its end."""
    published: list[int]
    pauses: list[tuple[str, float, float]]

    @property
    def engine(self) -> SGLangProcess:
        return self.engines[0]

    def expected(self, checkpoint: Oracle) -> tuple[dict[str, str], ...]:
        """Checksums of an engine with these weights."""
        return engine_checksums(load_hf_config(checkpoint.path), self.config.engines, checkpoint.weights)

    async def generate(self, tokens: int = 8) -> PooledGeneration:
        """Continue `PROMPT`."""
        return await self.pool.generate(PROMPT, Sampling(1.0, tokens, ()))

    async def sampled(self, task: DrawnTask, tokenizer: Tokenizer, count: int, sampling: Callable[[int], Sampling]) -> list[Trajectory]:
        """A response to each of the first prompts of a task."""
        scorer = Exact()

        async def one(group: int) -> Trajectory:
            stage = RolloutContext(self.pool, sampling(group), tokenizer, scorer)
            (record,) = await episode.run(stage, task.prompt(group), EpisodeId(group, 0, 0))
            return record

        return await asyncio.gather(*map(one, range(count)))

    async def publish_by_ranks(self, answer: Answer, out: Path, ranks: int, limit_s: float, **job: Any) -> Any:
        """Publish from a trainer with this many ranks, by tests/ranks/publish.py; return its results, with its files in a new folder."""
        out.mkdir()
        (out / "job.json").write_text(json.dumps(job))
        async with Server(answer) as server:
            keys.write(self.config.run.dir, rendezvous := await server.start())
            serving = asyncio.create_task(server.serve())
            try:
                return await asyncio.to_thread(launch.run, "publish", ranks, out, str(out / "job.json"), timeout_s=limit_s)
            finally:
                serving.cancel()
                keys.remove(self.config.run.dir, rendezvous)


def difference(answer: PooledGeneration, oracle: Oracle) -> float:
    """Largest log-probabilities of continuations of `PROMPT`."""
    return largest_difference(answer.generation.logprobs, oracle.logprobs(PROMPT, answer.generation.tokens, 1.0))


def settings(model: Path, run_dir: Path, **engines: object) -> Config:
    """A configuration of float32 engines."""
    return minimal(run_dir, model, engines={"dtype": "float32", "max_running": 64, **engines})


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, MadeModel(layers=4), seed=0)
    return path


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="session")
def make_rig(model: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Rig]]:
    """Starts a rig with this many engines, numbered from the second argument on."""
    with ExitStack() as stack:

        def start(count: int, first: int = 0) -> Rig:
            config = settings(model, tmp_path_factory.mktemp("run"), count=count)
            return stack.enter_context(running(config, runner, first, KEY))

        yield start


@pytest.fixture(scope="session")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """The one engine that the tests share."""
    return make_rig(1)


@pytest.fixture(scope="session")
def untouched(make_rig: Callable[..., Rig]) -> Rig:
    """An engine without updates, which keeps the checkpoint's weights. It can share a pool with `rig`'s engine."""
    return make_rig(1, 1)


@contextmanager
def running(
    config: Config, runner: asyncio.Runner, first: int = 0, key: str | None = None, start: Callable[[], Sequence[Any]] | None = None
) -> Iterator[Rig]:
    """Yield a rig of ready engines.

    Args:
        first: number of the first engine.
        start: starts other processes, of which the first are the engines, and the rest their other nodes.
    """
    engines: list[Any] = []
    published: list[int] = []
    pauses: list[tuple[str, float, float]] = []

    async def publish(version: int) -> None:
        published.append(version)

    async def begin() -> Rig:
        for index in range(config.engines.count if start is None else 0):
            engines.append(SGLangProcess(f"engine.{first + index}", config, index, key=key))
        engines.extend(() if start is None else start())
        members = engines[: config.engines.count]
        pool = Pool(members, 64, 60.0, lambda *span: None, adapter=asked(config), dp_ranks=config.engines.dp_attention)
        coordinator = WeightUpdateCoordinator(UpdateDriver(pool, 30.0, lambda *span: pauses.append(span)), publish)
        await asyncio.gather(*(engine.wait_ready() for engine in members))
        coordinator.engines_started()
        return Rig(config, engines, pool, coordinator, Sender(coordinator), runner.run, published, pauses)

    async def stop() -> None:
        await asyncio.gather(*(engine.stop() for engine in engines))

    try:
        yield runner.run(begin())
    finally:
        runner.run(stop())


def family(engine: SGLangProcess, part: str = "") -> list[psutil.Process]:
    """Return the processes of a server, or those with `part` in their command line or title."""
    main = psutil.Process(engine._child.pid)
    return [one for one in (main, *main.children(recursive=True)) if part in command_line(one)]


def ended(processes: list[psutil.Process], within_s: float = 10.0) -> bool:
    """Return whether all processes end in time."""

    def lives(one: psutil.Process) -> bool:
        try:
            return bool(one.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    return wait_for(lambda: not any(map(lives, processes)), within_s)
