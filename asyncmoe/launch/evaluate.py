"""`asyncmoe eval`: a checkpoint's scores on the evaluation sets of a configuration, without a run and without a trainer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from asyncmoe import models
from asyncmoe.async_tasks import cancelled, together
from asyncmoe.config import Config
from asyncmoe.config.devices import counted
from asyncmoe.config.sync import SyncSection
from asyncmoe.config.trainer import TrainerSection
from asyncmoe.doctor.pythons import check_engine_python
from asyncmoe.engines import backend
from asyncmoe.engines.engine import EngineProcess
from asyncmoe.engines.liveness import Liveness
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import ConfigError
from asyncmoe.launch import gpus
from asyncmoe.models import hub
from asyncmoe.rollout import parts
from asyncmoe.rollout.evaluation import Evaluator
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.scoring import trial
from asyncmoe.rollout.workers.worker import worker_of
from asyncmoe.scratch import Scratch
from asyncmoe.tables import grid
from asyncmoe.telemetry.format import number, percent
from asyncmoe.telemetry.rollout_schema import Evaluation
from asyncmoe.trajectory import NOTHING


def evaluate(model: Path, config: Config) -> list[Evaluation]:
    """Start the configured engines with a model on this machine, ask them the questions of every evaluation set, and end them. Return the
    result of each set, as an evaluation of version 0.

    Args:
        model: directory of a Hugging Face checkpoint, or the id of one on the hub.
        config: as for a run. Its trainer does not matter.

    Raises:
        ConfigError: there are no evaluation sets, or this machine has too few GPUs for the engines.
        UserError: as the start of a run raises for a model, data, a scorer, an environment or the engines' Python.
        EngineError: an engine did not start, or none is left.
    """
    asked = config.evaluation
    if not (asked.every or asked.sets or asked.path):
        expected = "evaluation.sets, evaluation.path, or evaluation.every above 0, which holds out questions of the task"
        raise ConfigError("evaluation", got="no questions in the configuration", expected=expected, hint="for example evaluation.every=1")
    scratch = Scratch()  # if an engine fails, its log stays there until the next process makes such a folder
    config = hub.with_local_model(alone(config, model, scratch.path))
    models.check(config, models.hf_config_of(config), weights=config.model.path)
    memory = [gpus.engine_arguments(config, index, alone=True) for index in range(config.engines.count)]
    check_engine_python(config.engines.python)
    parts.run(_ask(config, parts.load(config), memory, found := list[Evaluation]()))
    scratch.remove()
    return found


def alone(config: Config, model: Path, folder: Path) -> Config:
    """Return a configuration for engines that have a machine, its memory and all their slots to themselves.

    Args:
        folder: for the engines' logs.
    """
    engines, asked = config.engines, config.evaluation
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": folder, "steps": 0}),
            "model": config.model.model_copy(update={"path": model, "make": None}),
            "train": "full",
            "placement": "split",
            "trainer": TrainerSection(),
            "engines": engines.model_copy(update={"first_gpu": engines.first_gpu or 0, "nodes": 1}),
            "evaluation": asked.model_copy(update={"every": 1, "max_concurrent": asked.max_concurrent or config.max_concurrent}),
            "sync": SyncSection(method="broadcast"),  # it needs no engine memory
        }
    )


def table(found: Sequence[Evaluation]) -> Table:
    """Return a table with a row for each set."""
    ks = sorted({int(k) for one in found for k in one.pass_at})

    def cells(one: Evaluation) -> list[str]:
        passed = [number(one.pass_at.get(str(k))) for k in ks]
        score = f"{number(one.reward_mean)} ± {number(one.reward_stderr)}"
        ended = number(one.response_tokens_mean), percent(one.truncated_fraction), percent(one.failed_share)
        return [number(one.questions), score, *passed, *ended]

    columns = ["questions", "score", *(f"pass@{k}" for k in ks), "tokens", "truncated", "failed"]
    return grid("set", columns, ((one.name or "questions", cells(one)) for one in found))


async def _ask(config: Config, loaded: RolloutParts, memory: Sequence[Sequence[str]], found: list[Evaluation]) -> None:
    engines: list[EngineProcess] = []
    watching: list[asyncio.Task[None]] = []
    try:
        await trial.before_engines(config, loaded, loaded.scorer, None)
        print(f"starting {counted(len(memory), 'engine')}; logs: {config.run.dir / 'logs'}", file=sys.stderr, flush=True)
        for index, bounds in enumerate(memory):
            engines.append(backend.start(f"engine.{index}", config, index, memory=bounds))
        await together([engine.wait_ready() for engine in engines])
        pool = Pool(engines, config.max_concurrent, config.rollout.request_timeout_s, lambda *_: None, dp_ranks=config.engines.dp_attention)
        alive = Liveness(pool, config.engines.hang_timeout_s, lambda _: False)
        watching += map(asyncio.create_task, (pool.watch(), alive.run()))
        evaluator = Evaluator(config, worker_of(config, loaded, pool, NOTHING, 1), loaded.sets, found.append)
        for one in loaded.sets:
            found.append(await evaluator.evaluate(0, one))
    finally:
        await cancelled(watching)
        await asyncio.gather(*(engine.stop() for engine in engines))
        await loaded.close()
