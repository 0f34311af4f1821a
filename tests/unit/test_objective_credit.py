"""Contributions of steps and teachers to token advantages, against their formulae, one token at a time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.queue.group_buffer import describe
from asyncmoe.trainer.data.credit import credit_figures, outcome_advantages, token_advantages
from asyncmoe.trainer.objective import group_advantages
from asyncmoe.trajectory import Trajectory
from tests.unit.kept_trajectory import sampled

value = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 0.1]), st.floats(-5, 5, width=32).filter(lambda x: abs(x) > 1e-3 or x == 0))
token = st.tuples(st.booleans(), st.one_of(st.none(), value), st.floats(-6, 0, width=32), st.floats(-6, 0, width=32))
"""Sampled, a step's reward, log-probability under the engine and under the teacher."""
response = st.tuples(st.integers(0, 2), st.integers(0, 1), value, st.lists(token, min_size=1, max_size=12))
"""Group, agent, reward, tokens after the prompt's one."""


Drawn = tuple[int, int, float, list[tuple[bool, float | None, float, float]]]


def made(i: int, drawn: Drawn) -> Trajectory:
    group, agent, reward, tokens = drawn
    tokens = [(False, None, 0.0, 0.0), *tokens[:-1], (True, *tokens[-1][1:])]
    mask = np.array([t[0] for t in tokens])
    rewards = np.array([np.nan if t[1] is None or not t[0] else t[1] for t in tokens], np.float32)
    teacher = np.where(mask, [t[3] for t in tokens], 0).astype(np.float32)
    place = {"key": f"g{group}.e{i}.a{agent}.t0", "group": group, "episode": i, "agent": agent}
    return sampled(range(len(tokens)), mask, [t[2] for t in tokens], **place, reward=reward, rewards=rewards, teacher=teacher)


def steps_of(t: Trajectory) -> dict[int, float]:
    return {at: float(r) for at, r in enumerate(t.rewards) if r == r}


def of_token(batch: Sequence[Trajectory], i: int, at: int, section: ObjectiveSection) -> float:
    """What is added to the outcome's advantage, straight from the formulae."""
    own = batch[i]
    everyone = [r for t in batch if (t.group, t.agent) == (own.group, own.agent) for r in steps_of(t).values()]
    credit = 0.0
    if len(set(everyone)) > 1:
        deviation = statistics.stdev(everyone) + 1e-6
        credit = sum((r - statistics.fmean(everyone)) / deviation for end, r in steps_of(own).items() if end >= at)
    gap = float(own.teacher[at]) - float(own.logprobs[at]) if own.loss_mask[at] else 0.0
    clip = section.distill.clip
    if clip is not None:
        gap = max(-clip, min(clip, gap))
    return section.process.weight * credit + section.distill.weight * gap


@given(
    st.lists(response, min_size=1, max_size=7),
    st.floats(0, 3),
    st.floats(0, 3),
    st.one_of(st.none(), st.floats(0.1, 4)),
    st.sampled_from(["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]),
    st.data(),
)
def test_token_advantages_are_their_formula_on_whatever_rank(
    drawn: list[Drawn], process: float, distill: float, clip: float | None, advantage: str, data: st.DataObject
) -> None:
    section = ObjectiveSection.model_validate(
        {"advantage": advantage, "process": {"weight": process}, "distill": {"weight": distill, "clip": clip}}
    )
    batch = [made(i, one) for i, one in enumerate(drawn)]
    items = [describe(t) for t in batch]
    mine = data.draw(st.lists(st.integers(0, len(batch) - 1), unique=True))
    got = token_advantages(items, {i: batch[i] for i in mine}, section, outcome_advantages(items, section)[0], {})
    roles = [t.group * 2 + t.agent for t in batch]
    outcome = group_advantages([t.reward for t in batch], roles, section.advantage, [int(t.loss_mask.sum()) for t in batch])
    assert sorted(got) == sorted(mine)
    for i in mine:
        want = [float(outcome[i]) + of_token(batch, i, at, section) for at in range(len(batch[i]))]
        assert got[i].dtype == np.float32
        np.testing.assert_allclose(got[i], want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("reward", [0.1, 1e30, -7.0, 0.0])
@pytest.mark.parametrize("counts", [(1,), (3, 1), (7, 0, 2)])
def test_equal_steps_tell_exactly_nothing(reward: float, counts: tuple[int, ...]) -> None:
    tokens = [[(True, reward, -1.0, -1.0)] * n + [(True, None, -1.0, -1.0)] for n in counts]
    batch = [made(i, (0, 0, 1.0, one)) for i, one in enumerate(tokens)]
    section = ObjectiveSection.model_validate({"process": {"weight": 1.0}})
    items = [describe(t) for t in batch]
    for advantages in token_advantages(items, dict(enumerate(batch)), section, outcome_advantages(items, section)[0], {}).values():
        assert not advantages.any()


def test_figures_of_a_batch_are_means_over_its_steps_and_tokens() -> None:
    one = made(0, (0, 0, 1.0, [(True, 1.0, -1.0, -3.0), (True, 0.0, -2.0, -1.0), (True, None, -1.0, -1.5)]))
    other = made(1, (1, 0, 1.0, [(True, 4.0, -1.0, -1.0)]))
    bare = replace(other, rewards=None, teacher=None)
    assert credit_figures([describe(t) for t in (one, other, bare)]) == {"step_reward_mean": 5 / 3, "kl_teacher": 1.5 / 4}
    assert credit_figures([describe(bare)]) == {"step_reward_mean": None, "kl_teacher": None}
