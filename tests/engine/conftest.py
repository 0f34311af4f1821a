"""One real SGLang server for all tests of this folder, and one event loop in which everything talks to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncmoe import config as configuration
from asyncmoe.config import Config, MadeModel
from asyncmoe.models.make import make_model
from asyncmoe.rollout.engine import Engine
from asyncmoe.rollout.pool import Pool
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.rollout.weights import Conductor
from tests.engine.sender import Sender


@dataclass
class Rig:
    """A pool of one engine, its conductor, and what they recorded."""

    engine: Engine
    pool: Pool
    conductor: Conductor
    sender: Sender
    run: Callable[..., Any]
    """Runs a coroutine to its end."""
    published: list[int]
    pauses: list[tuple[str, float, float]]
    busy: list[tuple[str, float, float]]


def settings(model: Path, run_dir: Path, **engines: object) -> Config:
    """A configuration of one float32 engine."""
    values = {"run": {"dir": str(run_dir), "steps": 1}, "model": {"path": str(model)}, "task": {"kind": "arithmetic"}}
    return configuration.parse({**values, "engines": {"dtype": "float32", "max_running": 64, **engines}})


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, MadeModel(), seed=0)
    return path


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="session")
def make_rig(model: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Rig]]:
    rigs: list[Rig] = []

    def make() -> Rig:
        run_dir = tmp_path_factory.mktemp("run")
        rig = runner.run(_start(settings(model, run_dir), run_dir, runner.run))
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        runner.run(rig.engine.stop())


@pytest.fixture(scope="session")
def rig(make_rig: Callable[[], Rig]) -> Rig:
    """The server the tests share."""
    return make_rig()


async def _start(config: Config, run_dir: Path, run: Callable[..., Any]) -> Rig:
    engine = Engine("engine.0", config, 0, run_dir)
    published: list[int] = []
    pauses: list[tuple[str, float, float]] = []
    busy: list[tuple[str, float, float]] = []

    async def publish(version: int) -> None:
        published.append(version)

    pool = Pool([engine], 64, 60.0, lambda *span: busy.append(span))
    conductor = Conductor(pool, 30.0, publish, lambda *span: pauses.append(span))
    await engine.wait_ready()
    conductor.engines_started()
    return Rig(engine, pool, conductor, Sender(conductor), run, published, pauses, busy)
