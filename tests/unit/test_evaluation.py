"""Evaluation during training: its questions, its share of the engines, and its figures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from asyncmoe.config import Config
from asyncmoe.config.evaluation import EvaluationSet
from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.engines.scheduling import ScheduledRequest
from asyncmoe.engines.types import Listener, Sampling, VersionSpan
from asyncmoe.errors import EngineError, TrajectoryRejected
from asyncmoe.rollout import tasks
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.evaluation import Evaluator, due, measure, sampling, stage_of
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.rpc.worker_messages import Made
from asyncmoe.telemetry.rollout_schema import Evaluation
from asyncmoe.trajectory import NOTHING, Recording
from tests.configs import minimal
from tests.unit.asynchronous import asynchronous
from tests.unit.generations import generation_of

WARMUP, STEPS = 10, 30


def config(**evaluation: object) -> Config:
    sections = {"warmup": {"steps": WARMUP}, "rollout": {"max_concurrent": 24}, "task": {"kind": "arithmetic", "chat_template": False}}
    return minimal(steps=STEPS, evaluation={"every": 2, "prompts": 6, "samples": 2, **evaluation}, **sections)


def only(made: Config) -> EvaluationSet:
    (found,) = made.evaluation.every_set.values()
    return found


class Engines:
    """A pool that responds with the right answer to "a+b=", one turn of the event loop later, or as specified."""

    lost_tokens = recomputed_tokens = 0

    def __init__(self, known: Tokenizer) -> None:
        self.tokenizer, self.version = known, WARMUP
        self.asked: list[str] = []
        self.requests: list[ScheduledRequest] = []
        self.running = self.most = 0
        self.fails: dict[int, Exception] = {}
        self.go = asyncio.Event()
        self.go.set()

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, routed: int = 0, *, request: ScheduledRequest, listener: Listener | None
    ) -> PooledGeneration:
        number = len(self.asked)
        self.asked.append(self.tokenizer.decode(tokens))
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            await self.go.wait()
        finally:
            self.running -= 1
        if number in self.fails:
            raise self.fails[number]
        left, right = self.asked[number].rstrip("=").split("+")
        said = (*self.tokenizer.encode(str(int(left) + int(right))), self.tokenizer.eos)
        return PooledGeneration(
            generation_of(said, (0.0,) * len(said), (VersionSpan(str(self.version), 0, len(said)),), "stop", 0), self.version
        )


class Setup:
    """An evaluator over such a pool, running."""

    def __init__(self, known: Tokenizer, **evaluation: object) -> None:
        made = config(**evaluation)
        self.engines = Engines(known)
        self.found: list[Evaluation] = []
        loaded = tasks.load(made, known)
        self.task = loaded.training
        pool: Any = self.engines
        stage = RolloutContext(pool, Sampling(1.0, 8, (known.eos,), recording=Recording(masks=True)), known, Exact())
        sets = {name: stage_of(stage, name, section) for name, section in made.evaluation.every_set.items()}
        worker: Any = Worker(partial(episode.run, stage), 2, evaluated={name: partial(episode.run, one) for name, one in sets.items()})
        self.evaluator = Evaluator(made, worker, loaded.sets, self.found.append)
        self.running = asyncio.create_task(self.evaluator.run())

    async def evaluate(self, version: int) -> Evaluation:
        before = len(self.found)
        self.evaluator.published(version)
        async with asyncio.timeout(5):
            while len(self.found) == before:
                await asyncio.sleep(0)
        return self.found[-1]

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


def test_every_second_version_from_the_end_of_the_warm_up_is_due() -> None:
    assert [v for v in range(20) if due(v, WARMUP, 19, 2)] == [10, 12, 14, 16, 18, 19], "and the last"
    assert not any(due(v, WARMUP, 19, 0) for v in range(20))


@asynchronous
async def test_the_same_questions_every_time_and_not_those_of_training(known: Tokenizer) -> None:
    setup = Setup(known)
    first = await setup.evaluate(10)
    asked, setup.engines.asked = setup.engines.asked, []
    setup.engines.version = 12
    second = await setup.evaluate(12)
    await setup.stop()
    assert sorted(asked) == sorted(setup.engines.asked)
    assert len(asked) == 6 * 2
    assert sorted(asked)[::2] != sorted(setup.task.prompt(group).text for group in range(6))
    assert {request.prompt for request in setup.engines.requests} == {f"evaluation {group}" for group in range(6)}
    assert all(request.continues for request in setup.engines.requests), "they go before those of training that wait"
    assert [(e.version, e.version_min, e.version_max) for e in (first, second)] == [(10, 10, 10), (12, 12, 12)]
    assert (second.questions, second.episodes, second.reward_mean, second.reward_stderr, second.failed) == (6, 12, 1.0, 0.0, {})
    assert 2 <= (second.response_tokens_mean or 0) <= 3
    assert second.truncated_fraction == 0


@pytest.mark.parametrize(("max_concurrent", "most"), [(2, 2), (5, 5), (None, 24 // 8)])
@asynchronous
async def test_it_takes_no_more_places_than_it_may(known: Tokenizer, max_concurrent: int | None, most: int) -> None:
    setup = Setup(known, max_concurrent=max_concurrent)
    await setup.evaluate(10)
    await setup.stop()
    assert setup.engines.most == most


@asynchronous
async def test_the_last_version_waits_for_the_one_before_it_and_the_end_for_both(known: Tokenizer) -> None:
    setup = Setup(known)
    assert await setup.evaluator.ended(0.0)
    setup.engines.go.clear()
    for version in (10, 12, WARMUP + STEPS):
        setup.evaluator.published(version)
    assert not await setup.evaluator.ended(0.01)
    setup.engines.version = 14
    setup.engines.go.set()
    setup.evaluator.published(WARMUP + STEPS)  # by a trainer that was lost and came again
    assert await setup.evaluator.ended(5.0)
    await setup.stop()
    assert [(e.version, e.version_max, e.skipped) for e in setup.found] == [(10, 14, 1), (WARMUP + STEPS, 14, 1)]


@pytest.mark.parametrize(
    ("reason", "times", "failed", "asked"),
    [("engine_timeout", 3, {"engine_timeout": 3}, 12), ("engine_died", 2, {}, 14), ("engine_died", 3, {"engine_died": 1}, 14)],
)
@asynchronous
async def test_failures_are_never_scored_and_an_episode_whose_engine_died_is_asked_of_another_a_few_times(
    known: Tokenizer, reason: str, times: int, failed: dict[str, int], asked: int
) -> None:
    setup = Setup(known, max_concurrent=1)
    setup.engines.fails = {n: TrajectoryRejected(reason, "slow, or gone") for n in range(times)}
    found = await setup.evaluate(10)
    await setup.stop()
    assert (found.reward_mean, found.failed, found.failed_share) == (1.0, failed, sum(failed.values()) / 12)
    assert (found.episodes, len(setup.engines.asked)) == (12, asked)


@asynchronous
async def test_without_engines_it_ends_with_their_error(known: Tokenizer) -> None:
    setup = Setup(known)
    setup.engines.fails = {3: EngineError("no engine is left")}
    setup.evaluator.published(10)
    with pytest.raises(EngineError, match="no engine is left"):
        await asyncio.wait_for(setup.running, 5)
    assert (setup.found, setup.engines.running) == ([], 0)


def made(reward: float, versions: Sequence[int], agent: int = 0) -> Made:
    return Made(agent, reward, len(versions), min(versions), max(versions))


def test_standard_errors_are_those_of_means_over_questions() -> None:
    """The oracle is NumPy's sample deviation. Episodes of a question that agree do not make the mean more certain."""
    rewards = [[1.0, 1.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4, [0.0, 0.0, 1.0, 0.0]]
    outcomes = [(number, (made(reward, [5]),)) for number, each in enumerate(rewards) for reward in each]
    found = measure(5, outcomes, 1.0, 0, samples=4)
    assert found.reward_stderr == pytest.approx(np.std(np.mean(rewards, axis=1), ddof=1) / 2)
    passing = [[0.75, 0, 1, 0.25], [1, 0, 1, 0.5], [1, 0, 1, 1]]
    assert found.pass_at == pytest.approx({k: np.mean(of_k) for k, of_k in zip("124", passing, strict=True)})
    assert found.pass_at_stderr == pytest.approx({k: np.std(of_k, ddof=1) / 2 for k, of_k in zip("124", passing, strict=True)})
    same = measure(5, [(number, (made(reward, [5]),)) for number, reward in [(0, 0.0), (1, 1.0)] * 50], 1.0, 0, samples=50)
    assert same.reward_stderr == 0.5
    assert measure(5, outcomes[:4], 1.0, 0, samples=4).pass_at_stderr == {}


def test_it_samples_as_training_does_unless_told_otherwise() -> None:
    training = Sampling(0.7, 16, (2,), top_p=0.9, top_k=50, min_p=0.1, recording=Recording(masks=True))
    assert sampling(only(config()), training) == Sampling(0.7, 16, (2,), top_p=0.9, top_k=50, min_p=0.1, recording=NOTHING)
    own = config(temperature=0.2, top_p=1, max_new_tokens=99)
    assert sampling(only(own), training) == Sampling(0.2, 99, (2,), top_p=1, top_k=50, min_p=0.1)
    greedy = sampling(only(config(temperature=0)), training)
    assert (greedy.temperature, greedy.top_k) == (1.0, 1)
