"""A controller's producer, episodes, scoring and queue around a scripted engine, and one trainer rank, in turn in one process: its CPU time
is theirs. Megatron is prepared for this machine in it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from asyncmoe.process import freeze
from benchmarks.journal_switched import JournalInStretches

SIZES = {"groups_per_step": 16, "group_size": 8}
SHAPE = {"layers": 2, "hidden": 64, "experts": 8, "experts_per_token": 2, "expert_hidden": 64}


@dataclass
class Scripted:
    """A pool that answers at once with random tokens of the current version, and random experts."""

    most: int
    routing: Any
    random: Random
    version: int = 0
    lost_tokens: int = 0
    recomputed_tokens: int = 0
    recalled_tokens: int = 0

    async def generate(self, tokens: Sequence[int], sampling: Any, routed: int = 0, **_: object) -> Any:
        from asyncmoe.rollout.engines.pool import PooledGeneration
        from asyncmoe.rollout.engines.types import Generation, VersionSpan

        size = self.random.randint(max(self.most // 2, 1), self.most)
        said = (*(self.random.randrange(20, 60) for _ in range(size - 1)), sampling.stop[0])
        rows = len(tokens) + size - 1 - routed
        experts = np.tile(np.arange(self.routing.top_k, dtype="<i4"), (rows, self.routing.all_layers, 1))
        spans = (VersionSpan(str(self.version), 0, size),)
        logprobs = tuple(-4.0 - self.random.random() for _ in range(size))
        await asyncio.sleep(0)
        return PooledGeneration(Generation.of(said, logprobs, spans, "stop", 0, experts.tobytes()), self.version)


@dataclass(frozen=True)
class Measured:
    """A run.

    Attributes:
        each: CPU seconds and sampled tokens of each step.
        size: bytes of the journal.
    """

    each: Sequence[tuple[float, int]]
    size: int

    @property
    def tokens(self) -> int:
        """Tokens sampled in the run."""
        return sum(tokens for _, tokens in self.each)


class Rig:
    """One model for all runs: a controller's parts around a scripted engine, and one trainer rank."""

    def __init__(self, folder: Path) -> None:
        from asyncmoe.config import parse
        from asyncmoe.config.model import MadeModel
        from asyncmoe.models import load_hf_config
        from asyncmoe.models.make import make_model
        from asyncmoe.rollout.tokenizer import Tokenizer
        from asyncmoe.trainer import loop
        from asyncmoe.trainer.model import gpt, mesh, optimizer

        path = folder / "model"
        make_model(path, MadeModel(**SHAPE), seed=0)
        values = {
            "run": {"dir": str(folder / "run"), "steps": 1000},
            "model": {"path": str(path)},
            "task": {"kind": "arithmetic"},
            "rollout": {**SIZES, "max_concurrent": 64},
            "trainer": {"dtype": "float32"},
            "objective": {"correction": {"weight": "token", "cap": 2.0}},
            "telemetry": {"samples": {"groups": 0}},
            "verify": {"probe_every": 0},
        }
        self._config = config = parse(values)
        self._mesh = mesh.start(config.trainer)
        self._model = gpt.build(load_hf_config(path), config, self._mesh)
        gpt.load_hf(self._model, path)
        self._adam = optimizer.build(config, self._model)
        self._replay = loop.replay(config, self._model)
        self._tokenizer = Tokenizer(path)
        freeze()  # as controller and trainer do

    def run(self, most: int, steps: int, *, alternating: bool = False) -> Measured:
        """Train `steps` steps with a journal.

        Args:
            most: longest response, in tokens.
            alternating: keep the journal only in some stretches.
        """
        shutil.rmtree(self._config.run.dir, ignore_errors=True)
        return asyncio.run(self._run(most, steps, alternating))

    def _journal(self) -> Any:
        from asyncmoe.journal.belonging import Belonging
        from asyncmoe.journal.journal import Journal

        config = self._config
        section, run_dir = config.journal, config.run.dir
        run_dir.mkdir(parents=True, exist_ok=True)
        belonging = Belonging.of_run(run_dir, {"run.seed": "0"})
        made = Journal.open(section.place(run_dir), belonging, segment_bytes=section.segment_bytes, max_bytes=section.max_bytes)
        made.begin(0, 0, config.rollout.batch, 0)
        return made

    async def _run(self, most: int, steps: int, alternating: bool) -> Measured:
        from asyncmoe import models
        from asyncmoe.queue.bounded import BoundedQueue
        from asyncmoe.rollout import tasks
        from asyncmoe.rollout.engines.types import Sampling
        from asyncmoe.rollout.episodes import episode
        from asyncmoe.rollout.episodes.episode import RolloutContext
        from asyncmoe.rollout.producer import Producer
        from asyncmoe.rollout.scoring.exact import Exact
        from asyncmoe.trainer.batch_trainer import Learner
        from asyncmoe.trainer.objective import NO_PLUGINS
        from asyncmoe.trainer.samples import TrainerSamples

        config = self._config
        recording = models.recording(config, self._model.hf)
        batch, written = config.rollout.batch, self._journal()
        journal: Any = JournalInStretches(written, config.rollout.groups_per_step) if alternating else written
        queue = BoundedQueue(
            capacity=config.queue_capacity,
            batch=batch,
            group_size=config.rollout.group_size,
            max_staleness=1,
            recording=recording,
            journal=journal,
        )
        pool = Scripted(most, recording.routing, Random(1))
        sampling = Sampling(1.0, most, (self._tokenizer.eos,), recording=recording)
        stage: Any = RolloutContext(pool, sampling, self._tokenizer, Exact())  # type: ignore[arg-type]
        stage = replace(stage, turns=journal.turns)
        task = tasks.load(config, self._tokenizer).training
        producer = Producer(queue, task, partial(episode.run, stage), config.rollout.group_size, journal=journal)
        kept = TrainerSamples(config, self._mesh, 0, 0 if recording.routing is None else len(recording.routing.layers))
        client: Any = _Local(queue)
        learner = Learner(config, self._model, self._adam, client, self._replay, NO_PLUGINS, kept)
        producing = asyncio.create_task(producer.run())
        each, begin = [], time.process_time()
        for step in range(steps):
            leased = await queue.lease(step, "rl", batch, step, 60.0)
            learner.learn(leased, "rl", step, lambda: None)
            queue.commit(step)
            pool.version = step + 1
            queue.set_version(step + 1)
            tokens, now = sum(item.sampled for item in leased.items), time.process_time()
            each.append((now - begin, tokens))
            begin = now
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)
        size = written.size + written.turns.size
        written.close()
        return Measured(each, size)


@dataclass(frozen=True)
class _Local:
    """The trainer's connection to a queue in the same process."""

    queue: Any

    def ask(self, request: Any, timeout_s: float) -> tuple[Any, list[Any]]:
        """Answer a `Fetch`."""
        from asyncmoe.rpc.messages import Fetched

        frames = [bytes(frame) for frame in self.queue.fetch(request.step, request.keys, request.layers, request.masks)]
        return Fetched(request.keys), frames
