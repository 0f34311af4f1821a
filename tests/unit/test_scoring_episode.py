"""The parts of an episode that scorer and teacher see."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncmoe.engines.types import Sampling
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.episodes import episode
from asyncmoe.rollout.episodes.episode import RolloutContext
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.scoring import Sample, Score, Scorer
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import Trajectory
from tests.unit.test_environment import BOUNDS, Echo, Tool, Two


class Recorded:
    """Records its input; fails for one agent."""

    def __init__(self, reward: float, failing: str = "") -> None:
        self.reward, self.failing = reward, failing
        self.seen: list[Sample] = []
        self.cancelled = 0

    async def score(self, sample: Sample) -> Score:
        self.seen.append(sample)
        if sample.agent == self.failing:
            raise TrajectoryRejected("scorer_garbage", "no score")
        try:
            await asyncio.sleep(0.01 if not self.failing else 60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Score(self.reward, teacher=np.zeros(len(sample.tokens), np.float32))

    async def close(self) -> None:
        pass


def play(environment: Tool | Two, known: Tokenizer, scorer: Scorer, teacher: Scorer | None = None) -> tuple[Trajectory, ...]:
    pool: Any = Echo()
    stage = RolloutContext(pool, Sampling(1.0, 8, (2,)), known, scorer, environment, BOUNDS, 5.0, seed=3, teacher=teacher)
    return asyncio.run(episode.run(stage, Prompt("1+1=", known.encode("1+1="), "+1="), EpisodeId(5, 2, 1)))


def test_the_scorer_is_shown_exactly_what_becomes_the_trajectory(known: Tokenizer) -> None:
    scorer = Recorded(0.25)
    records = play(Two(None), known, scorer)
    assert [record.reward for record in records] == [0.25, 0.25]
    for sample, record, name in zip(scorer.seen, records, ("solver", "checker"), strict=True):
        assert sample.tokens == tuple(record.tokens)
        assert sample.sampled == tuple(record.loss_mask)
        assert (sample.prompt, sample.answer, sample.agent) == ("1+1=", "+1=", name)
        assert sample.response == known.decode(record.tokens[record.loss_mask].tolist())


def test_a_teacher_is_asked_also_where_the_environment_has_the_reward(known: Tokenizer) -> None:
    scorer, teacher = Recorded(0.25), Recorded(0.0)
    (record,) = play(Tool(), known, scorer, teacher)
    assert record.reward == 0.5
    assert record.teacher is not None
    assert scorer.seen == []
    # Without the last observation, which nobody answered.
    assert [sample.tokens for sample in teacher.seen] == [tuple(record.tokens)]


def test_when_one_agent_cannot_be_scored_nobody_waits_for_the_others(known: Tokenizer) -> None:
    scorer = Recorded(0.0, failing="checker")
    with pytest.raises(TrajectoryRejected, match="scorer_garbage"):
        play(Two(None), known, scorer)
    assert scorer.cancelled == 1
