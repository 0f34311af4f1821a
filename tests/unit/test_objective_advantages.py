"""Advantage estimators against their formulae, one response at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.errors import ConfigError
from asyncmoe.trainer.objective import group_advantages
from tests.configs import minimal

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
reward = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-5, 5).filter(lambda x: abs(x) > 1e-3 or x == 0))
batches = st.lists(st.tuples(reward, st.integers(0, 4), st.integers(0, 30)), max_size=24)


def of_group(rewards: Sequence[float], lengths: Sequence[int], i: int, estimator: str) -> float:
    """The advantage of response i of one group."""
    n, own = len(rewards), rewards[i]
    if len(set(rewards)) == 1:
        return 0.0
    if estimator == "dr_grpo":
        return own - sum(rewards) / n
    if estimator == "grpo":
        return (own - sum(rewards) / n) / (statistics.stdev(rewards) + 1e-6)
    if estimator == "rloo":
        return own - sum(r for j, r in enumerate(rewards) if j != i) / (n - 1)
    if estimator == "opo":
        total = sum(lengths)
        return own - (sum(n * r for n, r in zip(lengths, rewards, strict=True)) / total if total else 0.0)
    best, second = sorted(rewards)[-1], sorted(rewards)[-2]
    return (best - second) / (statistics.stdev(rewards) + 1e-6) if own == best else 0.0


def over_batch(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    tokens = [v for v, n in zip(values, lengths, strict=True) for _ in range(n)]
    if len(tokens) < 2 or len(set(values)) == 1:
        return [0.0] * len(values)
    return [(v - statistics.fmean(tokens)) / math.sqrt(statistics.variance(tokens) + 1e-8) for v in values]


def expected(batch: Sequence[tuple[float, int, int]], estimator: str) -> list[float]:
    rewards, groups, lengths = ([b[k] for b in batch] for k in range(3))
    if estimator == "reinforce_plus_plus":
        return over_batch(rewards, lengths)
    found = []
    for i, group in enumerate(groups):
        members = [j for j, g in enumerate(groups) if g == group]
        kind = {"reinforce_plus_plus_baseline": "dr_grpo", "gdpo": "grpo"}.get(estimator, estimator)
        found.append(of_group([rewards[j] for j in members], [lengths[j] for j in members], members.index(i), kind))
    if estimator == "gdpo":
        return [of_group(found, lengths, i, "grpo") for i in range(len(found))]
    return over_batch(found, lengths) if estimator == "reinforce_plus_plus_baseline" else found


def gdpo(parts: Sequence[tuple[float, Sequence[float]]], groups: Sequence[int]) -> list[float]:
    """GDPO, arXiv 2601.05242: each reward normalised within its group (equation 4), weighted and summed (5, 7), normalised over the batch
    (6). A response without a reward is not compared by it; one without any is not compared at all."""
    total = [0.0] * len(groups)
    for weight, part in parts:
        for i, (own, group) in enumerate(zip(part, groups, strict=True)):
            others = [j for j, g in enumerate(groups) if g == group and not math.isnan(part[j])]
            if not math.isnan(own):
                total[i] += weight * of_group([part[j] for j in others], [], others.index(i), "grpo")
    compared = [i for i in range(len(groups)) if any(not math.isnan(part[i]) for _, part in parts)]
    whole = [total[i] for i in compared]
    return [of_group(whole, [], compared.index(i), "grpo") if i in compared else 0.0 for i in range(len(total))]


some = st.one_of(st.sampled_from([0.0, 1.0, math.nan]), st.sampled_from([-3.0, 0.25, 7.5]))


@given(
    st.lists(st.tuples(some, some, some, st.integers(0, 3)), min_size=1, max_size=24), st.tuples(*[st.sampled_from([1.0, 0.5, -2.0])] * 3)
)
def test_gdpo_is_its_formula(batch: list[tuple[float, float, float, int]], weights: tuple[float, float, float]) -> None:
    groups = [one[3] for one in batch]
    parts = [(weight, [one[k] for one in batch]) for k, weight in enumerate(weights)]
    want = gdpo(parts, groups)
    got = group_advantages([0.0] * len(batch), groups, "gdpo", (), [(weight, np.array(part)) for weight, part in parts])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(batch=batches)
def test_advantages_are_their_formula(estimator: str, batch: list[tuple[float, int, int]]) -> None:
    rewards, groups, lengths = ([b[k] for b in batch] for k in range(3))
    got = group_advantages(rewards, groups, estimator, lengths)  # type: ignore[arg-type]
    assert (got.dtype, got.shape) == (np.float32, (len(batch),))
    want = expected(batch, estimator)
    if estimator.startswith("reinforce_plus_plus") and max(map(abs, want), default=0) > 1e3:
        return  # hardly any deviation over the tokens: rounding decides
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("value", [0.1, 1e30, -7.0])
def test_equal_rewards_and_groups_of_one_tell_nothing(estimator: str, value: float) -> None:
    """Exactly: the mean of equal numbers is rounded, and what is left must not be blown up by a deviation of nothing."""
    for rewards, groups in (([value] * 7, [3] * 7), ([value] * 3, [1, 2, 3])):
        assert (group_advantages(rewards, groups, estimator, [3] * len(rewards)) == 0).all()  # type: ignore[arg-type]
    assert len(group_advantages([], [], estimator, [])) == 0  # type: ignore[arg-type]


def test_groups_of_equal_rewards_are_not_dropped_before_an_estimator_that_learns_from_them() -> None:
    minimal(rollout={"filter_equal": True}, objective={"advantage": "reinforce_plus_plus_baseline"})
    for advantage in ("reinforce_plus_plus", "gdpo"):
        with pytest.raises(ConfigError, match=rf"rollout\.filter_equal: got true, .* because objective\.advantage is {advantage},"):
            minimal(rollout={"filter_equal": True}, objective={"advantage": advantage})
