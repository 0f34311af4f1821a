"""Evaluation beside training: puts the same questions to every `evaluation.every`-th version, through the same engines.

An evaluation of version v begins when every engine serves v, and nothing waits for it: if later versions land before it has ended, they
answer the remaining questions, and its record shows the range of versions. It uses a small share of the places at the engines, and does
not appear in the queue or its counts.
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
from asyncmoe.telemetry.rollout_schema import Evaluation
from asyncmoe.trajectory import Trajectory

log = logging.getLogger(__name__)
STREAM = "evaluation"
_SHARE = 8
"""Evaluation uses 1/`_SHARE` of the places at the engines, unless `evaluation.max_concurrent` is set."""

Outcome = tuple[Trajectory, ...] | TrajectoryRejected
"""The outcome of one episode."""


class Evaluator:
    """Evaluates versions, one evaluation at a time.

    Attributes:
        skipped: number of evaluations that were due while another was running.

    Args:
        stage: training's rollout context; evaluation has its own sampling.
        record: called with the result of each evaluation.
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
        """Report that every engine serves `version` from now on; if it is due, schedule its evaluation."""
        if not due(version, self._first, self._every):
            return
        if self._busy:
            self.skipped += 1
            log.warning("version %d is not evaluated: the evaluation before it is still running", version)
            return
        self._busy = True
        self._due.put_nowait(version)

    async def run(self) -> None:
        """Evaluate due versions until cancelled.

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
        # Raise outside the handler, so that the exception keeps its own cause and context.
        raise first

    async def _work(self, places: Iterator[EpisodeId], outcomes: list[tuple[int, Outcome]]) -> None:
        for place in places:
            try:
                outcome: Outcome = await episode.run(self._stage, self._task.prompt(place.group, STREAM), place)
            except TrajectoryRejected as rejected:
                outcome = rejected
            outcomes.append((place.group, outcome))


def due(version: int, first: int, every: int) -> bool:
    """Return True if `version` is evaluated; `first` is the version that reinforcement learning starts from."""
    return every > 0 and version >= first and (version - first) % every == 0


def sampling(config: Config, training: Sampling) -> Sampling:
    """Return evaluation's sampling: training's, except for the settings of its section. It records no sampling data."""
    section = config.evaluation
    greedy = section.temperature == 0
    return replace(
        training,
        # The temperature divides the logits, so it cannot be 0; sampling from the most probable token alone is equivalent.
        temperature=1.0 if greedy else section.temperature or training.temperature,
        top_k=1 if greedy else section.top_k or training.top_k,
        top_p=training.top_p if section.top_p is None else section.top_p,
        min_p=training.min_p if section.min_p is None else section.min_p,
        max_new_tokens=section.max_new_tokens or training.max_new_tokens,
        recording=NOTHING,
    )


def measure(version: int, outcomes: Sequence[tuple[int, Outcome]], seconds: float, skipped: int) -> Evaluation:
    """Summarize an evaluation.

    An episode's reward is the mean over its agents. Failed episodes have no reward: they are counted, but excluded from every mean.

    Args:
        outcomes: (question number, outcome) of every episode.
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
    # Episodes of one question are not independent; questions are.
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
