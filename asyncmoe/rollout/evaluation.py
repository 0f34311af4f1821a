"""Evaluation during training: every `evaluation.every`-th version and the last one get the same questions, on the same engines.

An evaluation of version v begins when every engine serves v, and no step waits for it: if later versions land before it has ended, they
answer the remaining questions, and its record shows the range of versions. The end of the run waits for it. It uses a small share of the
engines' slots, and does not appear in the queue or its counts. The sets of `evaluation.sets` are evaluated in turn, each with its own
record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import comb
from statistics import fmean

from asyncmoe.async_tasks import together
from asyncmoe.config import Config
from asyncmoe.config.evaluation import EvaluationSet
from asyncmoe.engines.types import Sampling
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.log.turns import EpisodeId
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.producer import Workers
from asyncmoe.rollout.tasks import EvaluationQuestions
from asyncmoe.rollout.tasks.order import EVALUATION as STREAM
from asyncmoe.rpc.worker_messages import LOST, Made
from asyncmoe.telemetry.clock import unix
from asyncmoe.telemetry.measured import MOST_NAMES, means, standard_error
from asyncmoe.telemetry.records import read_evaluations
from asyncmoe.telemetry.rollout_schema import Evaluation
from asyncmoe.telemetry.schema import EVALUATION
from asyncmoe.trajectory import NOTHING

log = logging.getLogger(__name__)
_SHARE = 8
"""Evaluation uses 1/`_SHARE` of the engines' slots, unless `evaluation.max_concurrent` is set."""

_ATTEMPTS = 3
"""Attempts at an episode whose engine died or whose worker was lost; as in training."""

Outcome = Sequence[Made] | TrajectoryRejected
"""The outcome of one episode."""


class Evaluator:
    """Evaluates versions, one evaluation at a time.

    Attributes:
        skipped: number of evaluations that were due while another was running.

    Args:
        workers: run and score the episodes, in the context that `stage_of` returns.
        sets: evaluated in this order.
        record: called with the result of each evaluation.
    """

    def __init__(self, config: Config, workers: Workers, sets: Sequence[EvaluationQuestions], record: Callable[[Evaluation], None]) -> None:
        section = config.evaluation
        self.skipped = 0
        self._records = config.run.dir / EVALUATION
        self._first, self._last, self._every = config.warmup.steps, config.warmup.steps + config.run.steps, section.every
        self._pass_reward = section.pass_reward
        self._concurrent = section.max_concurrent or -(-config.max_concurrent // _SHARE)
        self._workers, self._sets, self._record = workers, sets, record
        self._due: asyncio.Queue[int] = asyncio.Queue()
        self._last_is_due = False
        self._unfinished = 0

    def published(self, version: int) -> None:
        """Report that every engine serves `version` from now on; if its evaluation is due, schedule it."""
        if not due(version, self._first, self._last, self._every) or (version == self._last and self._last_is_due):
            return
        self._last_is_due = version == self._last
        if self._unfinished and version != self._last:
            self.skipped += 1
            log.warning("version %d is not evaluated: the evaluation before it is still running", version)
            return
        self._unfinished += 1
        self._due.put_nowait(version)

    def known(self, version: int) -> bool:
        """Return whether the evaluation of a version is on record."""
        return sum(one.version == version for one in read_evaluations(self._records)) >= len(self._sets)

    async def run(self) -> None:
        """Evaluate due versions until cancelled.

        Raises:
            EngineError: no engine is left.
        """
        while True:
            version = await self._due.get()
            for one in self._sets:
                self._record(await self.evaluate(version, one))
            self._unfinished -= 1
            self._due.task_done()

    async def ended(self, wait_s: float) -> bool:
        """Wait at most `wait_s` seconds until no evaluation is due or running; return whether that is so."""
        try:
            async with asyncio.timeout(wait_s):
                await self._due.join()
        except TimeoutError:
            return False
        return True

    async def evaluate(self, version: int, asked: EvaluationQuestions) -> Evaluation:
        """Ask the questions of one set now. Raises as `run`."""
        begin, samples = time.perf_counter(), asked.section.samples or 1
        places = iter([EpisodeId(group, member, 0) for group, member in product(range(asked.count), range(samples))])
        outcomes: list[tuple[int, Outcome]] = []
        await together([self._work(asked, places, outcomes) for _ in range(self._concurrent)])
        seconds = time.perf_counter() - begin
        return measure(version, outcomes, seconds, self.skipped, name=asked.name, samples=samples, pass_reward=self._pass_reward)

    async def _work(self, asked: EvaluationQuestions, places: Iterator[EpisodeId], outcomes: list[tuple[int, Outcome]]) -> None:
        for place in places:
            prompt = asked.task.prompt(place.group, STREAM)
            for attempt in range(_ATTEMPTS):
                try:
                    outcome: Outcome = await self._workers.evaluate(asked.name, prompt, EpisodeId(place.group, place.episode, attempt))
                except TrajectoryRejected as rejected:
                    outcome = rejected
                    if rejected.reason in ("engine_died", LOST):  # other engines or workers can answer
                        continue
                break
            outcomes.append((place.group, outcome))


def due(version: int, first: int, last: int, every: int) -> bool:
    """Return True if `version` is evaluated; `first` is the version that reinforcement learning starts from, `last` the one it
    ends with."""
    return every > 0 and version >= first and (version == last or (version - first) % every == 0)


def stage_of(training: RolloutContext, name: str, section: EvaluationSet) -> RolloutContext:
    """Return the context of an evaluation set's episodes."""
    return replace(
        training,
        teacher=None,
        sampling=sampling(section, training.sampling),
        # Each set has its own stream: episodes of two sets must not share conversations or random draws.
        stream=f"{STREAM} {name}".strip(),
        # Its few requests go first: with a high `max_staleness`, thousands from training may wait, and later versions would answer instead.
        ahead=True,
    )


def sampling(section: EvaluationSet, training: Sampling) -> Sampling:
    """Return a set's sampling: training's, except for the settings of its section. It records no sampling data."""
    greedy = section.temperature == 0
    return replace(
        training,
        # The temperature divides the logits, so it cannot be 0; sampling from the most probable token alone is equivalent.
        temperature=1.0 if greedy else section.temperature or training.temperature,
        top_k=1 if greedy else training.top_k,
        top_p=training.top_p if section.top_p is None else section.top_p,
        max_new_tokens=section.max_new_tokens or training.max_new_tokens,
        recording=NOTHING,
    )


def pass_chances(rewards: Sequence[Sequence[float]], samples: int, threshold: float) -> Mapping[str, list[float]]:
    """Return, for k = 1, 2, 4 ... and `samples`, each question's chance that at least one of k episodes passes; their mean is pass@k.

    For a question with n episodes, of which c pass, the unbiased estimate is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating
    Large Language Models Trained on Code", equation 1). Questions with fewer than k rewards are left out; so is a k for which none is left.

    Args:
        rewards: the rewards of each question's episodes.
        samples: episodes per question; the largest k.
        threshold: lowest reward with which an episode passes.
    """
    counts = [(len(of_question), sum(reward >= threshold for reward in of_question)) for of_question in rewards]
    ks = sorted({*(1 << bit for bit in range(samples.bit_length())), samples})
    found = {str(k): [1 - comb(n - c, k) / comb(n, k) for n, c in counts if n >= k] for k in ks}
    return {k: chances for k, chances in found.items() if chances}


def measure(
    version: int,
    outcomes: Sequence[tuple[int, Outcome]],
    seconds: float,
    skipped: int,
    *,
    name: str = "",
    samples: int = 1,
    pass_reward: float = 1.0,
) -> Evaluation:
    """Summarize an evaluation.

    An episode's reward is the mean over its agents, an agent's is the mean over the paths of its tree; metrics likewise. Failed
    episodes have no reward: they are counted, but excluded from every mean.

    Args:
        outcomes: (question number, outcome) of every episode.
        name: name of the set.
        samples, pass_reward: see `pass_chances`.
    """
    rewards: dict[int, list[float]] = {}
    metrics: dict[int, list[Mapping[str, float]]] = {}
    lengths: list[int] = []
    cut: list[bool] = []
    versions: set[int] = set()
    failed: Counter[str] = Counter()
    for question, outcome in outcomes:
        if isinstance(outcome, TrajectoryRejected):
            failed[outcome.reason] += 1
            continue
        trees: dict[int, list[Made]] = {}
        for one in outcome:
            trees.setdefault(one.agent, []).append(one)
        rewards.setdefault(question, []).append(fmean(fmean(one.reward for one in paths) for paths in trees.values()))
        metrics.setdefault(question, []).append(means(means(one.metrics for one in paths) for paths in trees.values()))
        lengths.append(sum(one.sampled for one in outcome))
        cut += [one.truncated for one in outcome]
        versions.update(version for one in outcome for version in (one.oldest, one.newest))
    chances = pass_chances(list(rewards.values()), samples, pass_reward)
    errors = {k: error for k, of_k in chances.items() if (error := standard_error(of_k)) is not None}
    of_questions = [fmean(of_question) for of_question in rewards.values()]
    return Evaluation(
        time=unix(),
        version=version,
        name=name,
        samples=samples,
        pass_at={k: fmean(of_k) for k, of_k in chances.items()},
        pass_at_stderr=errors,
        questions=len({question for question, _ in outcomes}),
        episodes=len(outcomes),
        reward_mean=fmean(of_questions) if of_questions else None,
        reward_stderr=standard_error(of_questions),
        metrics=means(map(means, metrics.values()), MOST_NAMES),
        failed=dict(sorted(failed.items())),
        failed_share=failed.total() / len(outcomes),
        response_tokens_mean=fmean(lengths) if lengths else None,
        truncated_fraction=fmean(cut) if cut else None,
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        seconds=seconds,
        skipped=skipped,
    )
