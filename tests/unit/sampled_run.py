"""A run directory with samples, written by the real controller's and trainer's writers around a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from asyncmoe.config import Config
from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.engines.types import Sampling, VersionSpan
from asyncmoe.log.turns import EpisodeId
from asyncmoe.platform import collectives
from asyncmoe.queue.group_buffer import describe
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.environment import Bounds, Environment
from asyncmoe.rollout.episodes.environments.single_turn import SingleTurn
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.pieces import Pieces
from asyncmoe.rollout.sampled_episodes import EpisodeNotes, SampledEpisode
from asyncmoe.rollout.samples import Samples, samples_of
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.telemetry.samples.choice import choice_of
from asyncmoe.trainer.data import batch
from asyncmoe.trainer.data.batch import MicroBatch
from asyncmoe.trainer.data.schedule import BatchGrid
from asyncmoe.trainer.losses import PolicyLoss
from asyncmoe.trainer.samples import TrainerSamples
from asyncmoe.trajectory import Trajectory
from tests.configs import minimal
from tests.unit import openai_policy
from tests.unit.generations import generation_of

SIZE, GROUPS = 2, 4


def config_of(run_dir: Path) -> Config:
    """A configuration whose steps have four groups of two, all of them kept."""
    groups = {"rollout": {"groups_per_step": GROUPS, "group_size": SIZE}, "telemetry": {"samples": {"groups": GROUPS}}}
    return minimal(model=run_dir, run={"dir": str(run_dir), "steps": 9, "seed": 3}, **groups)


@dataclass
class Scripted:
    """A pool that says some texts in turn; the first half of a response is of version 3, the rest of version 4."""

    tokenizer: Tokenizer
    texts: list[str]

    async def generate(self, tokens: Sequence[int], sampling: Sampling, routed: int = 0, **_: object) -> PooledGeneration:
        said = (*self.tokenizer.encode(self.texts.pop(0)), self.tokenizer.eos)
        half = len(said) // 2
        logprobs = tuple(-0.01 * (i + 1) for i in range(len(said)))
        spans = tuple(span for span in (VersionSpan("3", 0, half), VersionSpan("4", half, len(said))) if span.end > span.start)
        return PooledGeneration(generation_of(said, logprobs, spans, "stop", 0), 3)


class Told(dict[EpisodeId, SampledEpisode]):
    """What a worker's episodes leave, of which the controller hears at once."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self._samples = samples

    def __setitem__(self, place: EpisodeId, left: SampledEpisode) -> None:
        self._samples.noted(place, left)


class SampledRun:
    """Plays groups, and trains on them, as controller and trainer do."""

    def __init__(self, run_dir: Path, environment: Environment | None = None, scorer: Any = None, step: int = 0) -> None:
        from asyncmoe.rollout.scoring.exact import Exact

        run_dir.mkdir(parents=True, exist_ok=True)
        self.config = config_of(run_dir)
        (run_dir / "config.yaml").write_text(yaml.safe_dump(self.config.model_dump(mode="json")))
        (model := run_dir.parent / "model").mkdir(exist_ok=True)
        self.tokenizer = openai_policy.tokenizer(model)
        self.pool = Scripted(self.tokenizer, [])
        self.samples: Any = samples_of(self.config, Pieces(self.tokenizer), step)
        bounds = Bounds(8, 4096, 4)
        stage = RolloutContext(
            self.pool,  # type: ignore[arg-type]
            Sampling(1.0, 4096, (self.tokenizer.eos,)),
            self.tokenizer,
            scorer or Exact(),
            environment or SingleTurn(),
            bounds,
            5.0,
        )
        notes = EpisodeNotes(choice_of(self.config))
        self.stage = replace(stage, opened=notes.opened)
        self.worker = Worker(partial(episode.run, self.stage), SIZE, notes=notes)
        self.worker.left = Told(self.samples)
        mesh: Any = SimpleNamespace(rank=0, reports=True)
        self.trainer = TrainerSamples(self.config, mesh, step, layers=2)

    def prompt(self, text: str = "12+7=", answer: str = "19") -> Prompt:
        return Prompt(text, self.tokenizer.encode(text), answer)

    def group(self, number: int, texts: list[str], prompt: Prompt | None = None) -> list[Trajectory]:
        """Play a whole group and note it as queued."""
        asked = prompt or self.prompt()
        places = [EpisodeId(number, i, 0) for i in range(SIZE)]

        async def played() -> list[Trajectory]:
            found: list[Trajectory] = []
            self.pool.texts += texts
            for place in places:
                await self.worker.episode(asked, place)
                found += self.worker._ended[number][place]
            await self.samples.write(places, asked, "queued", 4, "")
            return found

        return asyncio.run(played())

    def train(self, trajectories: Sequence[Trajectory], version: int, drift: float = 0.1) -> None:
        """Train on whole groups as one micro-batch. The trainer's log-probabilities are the engine's plus `drift`."""
        items = [describe(t) for t in trajectories]
        collected = self.trainer.of(items)
        section = ObjectiveSection(clip_high=0.05, correction={"token_band": (0.5, 2.0)})  # type: ignore[arg-type]
        loss = PolicyLoss(section, 1.0, version, observe=collected.observe)
        self._micro(loss, collected, trajectories, list(range(len(items))), drift)
        with pytest.MonkeyPatch.context() as alone:  # a trainer of one rank: its sum over all ranks is its own part
            alone.setattr(collectives, "total", lambda tensor: tensor)
            self.trainer.write(collected, items, dict(enumerate(trajectories)), version)

    def _micro(self, loss: PolicyLoss, collected: Any, trajectories: Any, indices: list[int], drift: float) -> None:
        made: MicroBatch = batch.pack(
            dict(enumerate(trajectories)),
            indices,
            advantages={i: np.float32(1.0 - 2.0 * (i % 2)) for i in indices},
            weights=[0.1] * len(trajectories),
            grid=BatchGrid(),
            packed=True,
        )
        new = (made.behaviour + drift).requires_grad_()
        if (counter := collected.count(made)) is not None:
            counter += made.tokens[0].int() % 3
        loss(new, made, None)
