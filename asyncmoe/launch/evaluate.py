"""`asyncmoe eval`: a checkpoint's scores on the evaluation sets of a configuration, without a run and without a trainer."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.table import Table

from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.config.cluster import ClusterSection
from asyncmoe.config.devices import counted
from asyncmoe.config.sync import SyncSection
from asyncmoe.config.trainer import TrainerSection
from asyncmoe.doctor.pythons import check_engine_python
from asyncmoe.engines import backend
from asyncmoe.engines.engine import EngineProcess
from asyncmoe.engines.liveness import Liveness
from asyncmoe.engines.pool import Pool
from asyncmoe.errors import ConfigError, DataError, EngineError, WaitTimeout
from asyncmoe.launch import gpus
from asyncmoe.models import hub
from asyncmoe.rollout import parts
from asyncmoe.rollout.async_tasks import cancelled, together
from asyncmoe.rollout.evaluation import Evaluator
from asyncmoe.rollout.parts import RolloutParts
from asyncmoe.rollout.scoring import trial
from asyncmoe.rollout.workers.worker import worker_of
from asyncmoe.tables import grid
from asyncmoe.telemetry.format import number, percent
from asyncmoe.telemetry.rollout_schema import Evaluation
from asyncmoe.trajectory import NOTHING


def evaluate(model: Path, config: Config) -> list[Evaluation]:
    """Start the configured engines with a model on this machine, ask them the questions of every evaluation set, and end them. Return the
    result of each set, as one of version 0.

    Nothing is written, except the engines' logs to a temporary folder, which stays if an engine fails.

    Args:
        model: directory of a Hugging Face checkpoint, or the id of one on the hub.
        config: as for a run. Its trainer does not matter.

    Raises:
        ConfigError: there are no evaluation sets, or this machine has too few GPUs for the engines.
        DataError: `model` is no checkpoint, or lacks a chat template that the questions need.
        UserError: as the start of a run raises for a model, data, a scorer, an environment or the engines' Python.
        EngineError: an engine did not start, or none is left.
    """
    asked = config.evaluation
    if not (asked.every or asked.sets or asked.path):
        expected = "questions to ask: evaluation.sets, evaluation.path, or evaluation.every above 0 for some held out from the task"
        raise ConfigError("evaluation", got="none in the configuration", expected=expected, hint="for example evaluation.every=1")
    if (model / "config.yaml").is_file():
        hint = f"asyncmoe export {model} OUT writes one from its newest checkpoint"
        raise DataError(str(model), got="the directory of a run", expected="a Hugging Face model directory", hint=hint)
    folder = Path(tempfile.mkdtemp(prefix="asyncmoe-eval-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        config = hub.with_local_model(alone(config, model, folder))
        models.check(config, models.hf_config_of(config), weights=config.model.path)
        memory = [gpus.engine_arguments(config, index, alone=True) for index in range(config.engines.count)]
        check_engine_python(config.engines.python)
        loaded = parts.load(config)
        try:
            parts.run(_ask(config, loaded, memory, found := list[Evaluation]()))
        except (EngineError, WaitTimeout):  # which name the logs
            stack.pop_all()
            raise
    return found


def alone(config: Config, model: Path, folder: Path) -> Config:
    """Return a configuration for engines that have a machine, and every slot, to themselves.

    Args:
        folder: for the engines' logs.
    """
    engines, asked = config.engines, config.evaluation
    slots = asked.max_concurrent or engines.count * engines.max_running
    changed = {
        "run": (config.run, {"dir": folder}),
        "model": (config.model, {"path": model, "make": None}),
        "engines": (engines, {"first_gpu": engines.first_gpu or 0, "share_gpus": False, "nodes": 1}),
        "evaluation": (asked, {"every": 1, "max_concurrent": slots}),
        "sync": (SyncSection(method="broadcast"), {}),  # which needs no memory on an engine's GPU
    }
    sections = {name: section.model_copy(update=values) for name, (section, values) in changed.items()}
    return config.model_copy(update={**sections, "train": "full", "trainer": TrainerSection(), "cluster": ClusterSection()})


def table(found: Sequence[Evaluation]) -> Table:
    """Return a table with a row for each set."""
    ks = sorted({int(k) for one in found for k in one.pass_at})
    rows = []
    for one in found:
        cells = [number(one.questions), f"{number(one.reward_mean)} ± {number(one.reward_stderr)}"]
        cells += [number(one.pass_at.get(str(k))) for k in ks]
        cells += [number(one.response_tokens_mean), percent(one.truncated_fraction), percent(one.failed_share)]
        rows.append((one.name or "questions", cells))
    return grid("set", ["questions", "score", *(f"pass@{k}" for k in ks), "tokens", "truncated", "failed"], rows)


async def _ask(config: Config, loaded: RolloutParts, memory: Sequence[Sequence[str]], found: list[Evaluation]) -> None:
    engines: list[EngineProcess] = []
    watching: list[asyncio.Task[None]] = []
    try:
        await trial.before_engines(config, loaded, loaded.scorer, None)
        logs = config.run.dir / "logs"
        print(f"starting {counted(len(memory), 'engine')} with {config.model.path}; logs: {logs}", file=sys.stderr, flush=True)
        for index, bounds in enumerate(memory):
            engines.append(backend.start(f"engine.{index}", config, index, memory=bounds))
        await together([engine.wait_ready() for engine in engines])
        pool = Pool(engines, config.evaluation.max_concurrent or 1, config.rollout.request_timeout_s, lambda *_: None)
        alive = Liveness(pool, config.engines.hang_timeout_s, lambda _: False)
        watching += map(asyncio.create_task, (pool.watch(), alive.run()))
        evaluator = Evaluator(config, worker_of(config, loaded, pool, NOTHING, 1), loaded.sets, found.append)
        for one in loaded.sets:
            found.append(await evaluator.evaluate(0, one))
    finally:
        await cancelled(watching)
        await asyncio.gather(*(engine.stop() for engine in engines))
        await loaded.close()
