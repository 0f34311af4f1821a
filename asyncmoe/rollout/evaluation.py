"""Evaluation beside training: the same questions to every so many versions, through the same engines.

An evaluation of version v begins when every engine serves v, and nobody waits for it: should later versions land before it has ended, the
rest of it is answered by those, and its record says so. It takes a small share of the places at the engines, and nothing of it is in the
queue or its counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import sqrt
from statistics import fmean, stdev

from asyncmoe.config import Config
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.record import NOTHING
from asyncmoe.rollout import scoring
from asyncmoe.rollout.engines.engine_client import Sampling
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.tasks import Task
from asyncmoe.telemetry.schema import Evaluation
from asyncmoe.trajectory import Trajectory

log = logging.getLogger(__name__)
STREAM = "evaluation"
_SHARE = 8
"""One in so many places at the engines, unless `evaluation.max_concurrent` says otherwise."""

Outcome = tuple[Trajectory, ...] | TrajectoryRejected
"""Of one episode."""


class Evaluator:
    """Evaluates versions, one evaluation at a time.

    Attributes:
        skipped: evaluations that were due while one was running.

    Args:
        stage: of training; evaluation has its own sampling.
        record: called with the result of each.
    """

    def __init__(self, config: Config, stage: RolloutContext, task: Task, record: Callable[[Evaluation], None]) -> None:
        section = config.evaluation
        self.skipped = 0
        self._first, self._every = config.warmup.steps, section.every
        self._prompts, self._samples = section.prompts, section.samples
        self._concurrent = section.max_concurrent or -(-config.rollout.max_concurrent // _SHARE)
        self._stage = replace(stage, sampling=sampling(config, stage.sampling), stream=STREAM, scorer=scoring.untaught(stage.scorer))
        self._task, self._record = task, record
        self._due: asyncio.Queue[int] = asyncio.Queue()
        self._busy = False

    def published(self, version: int) -> None:
        """Every engine serves `version` from now on."""
        if not due(version, self._first, self._every):
            return
        if self._busy:
            self.skipped += 1
            log.warning("version %d is not evaluated: the evaluation before it is still running", version)
            return
        self._busy = True
        self._due.put_nowait(version)

    async def run(self) -> None:
        """Evaluate what is due until cancelled.

        Raises:
            EngineError: no engine is left.
        """
        while True:
            version = await self._due.get()
            self._record(await self._evaluate(version))
            self._busy = False

    async def _evaluate(self, version: int) -> Evaluation:
        begin = time.perf_counter()
        places = iter([EpisodeId(group, member, 0) for group, member in product(range(self._prompts), range(self._samples))])
        outcomes: list[tuple[int, Outcome]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._concurrent):
                    tasks.create_task(self._work(places, outcomes))
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        else:
            return measure(version, outcomes, time.perf_counter() - begin, self.skipped)
        # Outside the handler, so that the exception keeps its own cause and context.
        raise first

    async def _work(self, places: Iterator[EpisodeId], outcomes: list[tuple[int, Outcome]]) -> None:
        for place in places:
            try:
                outcome: Outcome = await episode.run(self._stage, self._task.prompt(place.group, STREAM), place)
            except TrajectoryRejected as rejected:
                outcome = rejected
            outcomes.append((place.group, outcome))


def due(version: int, first: int, every: int) -> bool:
    """Whether `version` is evaluated, where `first` is the one that reinforcement learning starts from."""
    return every > 0 and version >= first and (version - first) % every == 0


def sampling(config: Config, training: Sampling) -> Sampling:
    """How evaluation draws: as training, but for what its section says. Nothing is recorded of how a token was sampled."""
    section = config.evaluation
    greedy = section.temperature == 0
    return replace(
        training,
        # Temperature 0 is a division by it elsewhere; the most probable token alone is the same.
        temperature=1.0 if greedy else section.temperature or training.temperature,
        top_k=1 if greedy else section.top_k or training.top_k,
        top_p=training.top_p if section.top_p is None else section.top_p,
        min_p=training.min_p if section.min_p is None else section.min_p,
        max_new_tokens=section.max_new_tokens or training.max_new_tokens,
        recording=NOTHING,
    )


def measure(version: int, outcomes: Sequence[tuple[int, Outcome]], seconds: float, skipped: int) -> Evaluation:
    """What an evaluation found.

    An episode's reward is the mean of its agents'. Episodes that failed have none: they are counted, and no part of any mean.

    Args:
        outcomes: (number of the question, outcome) of every episode.
    """
    rewards: dict[int, list[float]] = {}
    lengths: list[int] = []
    versions: set[int] = set()
    failed: Counter[str] = Counter()
    for question, outcome in outcomes:
        if isinstance(outcome, TrajectoryRejected):
            failed[outcome.reason] += 1
            continue
        rewards.setdefault(question, []).append(fmean(trajectory.reward for trajectory in outcome))
        lengths.append(sum(int(trajectory.loss_mask.sum()) for trajectory in outcome))
        versions.update(int(v) for trajectory in outcome for v in trajectory.versions[trajectory.loss_mask])
    # Episodes of one question are not independent of each other, questions are.
    means = [fmean(of_question) for of_question in rewards.values()]
    return Evaluation(
        time=time.time(),
        version=version,
        questions=len({question for question, _ in outcomes}),
        episodes=len(outcomes),
        reward_mean=fmean(means) if means else None,
        reward_stderr=stdev(means) / sqrt(len(means)) if len(means) > 1 else None,
        failed=dict(sorted(failed.items())),
        failed_share=failed.total() / len(outcomes),
        response_tokens_mean=fmean(lengths) if lengths else None,
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        seconds=seconds,
        skipped=skipped,
    )
