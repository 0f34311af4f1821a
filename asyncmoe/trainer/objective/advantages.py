"""Outcome advantages: how much better than expected each response was, from one reward per response over a whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncmoe.config.objective import Advantage

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[int],
    estimator: Advantage,
    sampled: Sequence[int] = (),
    parts: Sequence[tuple[float, np.ndarray]] = (),
) -> np.ndarray:
    """Compute one advantage per response, shared by all its tokens: float32[n].

    With r the rewards of a group of n responses to one prompt, and sample deviations dividing by n - 1:
        grpo                          (r - mean) / (sample deviation + 1e-6)   DeepSeekMath, arXiv 2402.03300, section 4.1.2
        dr_grpo                       r - mean                                 Dr. GRPO, arXiv 2503.20783
        rloo                          r - mean of the n - 1 others             arXiv 2402.14740
        opo                           r - sum(l r) / sum(l)                    l tokens each; OPO, arXiv 2505.23585
        pass_at_k                     (best - second best) / (sample deviation + 1e-6) for the best, 0 for others   arXiv 2503.19595
        reinforce_plus_plus           normalised over the batch                arXiv 2501.03262
        reinforce_plus_plus_baseline  r - mean, then normalised over the batch
        gdpo                          sum(w grpo(part)), then as grpo over the batch as one group: GDPO, arXiv 2601.05242, equations 4 to 7.
                                      A missing part adds 0 and enters no comparison; a response without parts has 0 (as in TRL)
    Normalised: (a - mean(a)) / sqrt(var(a) + 1e-8), with mean and sample variance over all tokens of the batch, so that a response counts
    once per token.

    A group with equal rewards, or with a single response, carries no signal: its advantages are exactly 0. pass_at_k also gives 0 for a
    tie. But advantages normalised over the batch are exactly 0 only if all values of the batch are equal or it has a single token, so
    reinforce_plus_plus_baseline gives every group of equal rewards the same advantage, -mean(a) / sqrt(var(a) + 1e-8), as
    OpenRLHF (`reinforce_baseline`) and verl do: mean(a), over tokens, is the covariance of length and reward within groups, divided by the
    mean length, so the advantage says nothing about the group's prompt, and `rollout.filter_equal` may drop the group.

    Args:
        rewards: n finite numbers.
        groups: n; equal for responses to one prompt.
        sampled: n; number of sampled tokens in each response. Required by opo, reinforce_plus_plus and reinforce_plus_plus_baseline.
        parts: for gdpo, (weight, values float64[n]) of each part of the reward, NaN where a response lacks the part; empty: the reward
            itself.
    """
    reward, group, length = np.asarray(rewards, np.float64), np.asarray(groups), np.asarray(sampled, np.float64)
    if not len(reward):
        return np.zeros(0, np.float32)
    _, member, count = np.unique(group, return_inverse=True, return_counts=True)
    if estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        value = reward if estimator == "reinforce_plus_plus" else _centred(reward, member, count)
        return _normalised(value, length).astype(np.float32)
    if estimator == "gdpo":
        parts = parts or [(1.0, reward)]
        total = sum((weight * _grpo(part, group) for weight, part in parts), np.zeros(len(reward)))
        none = np.all([np.isnan(part) for _, part in parts], axis=0)
        value = _grpo(np.where(none, np.nan, total), np.zeros(len(reward)))
    elif estimator == "opo":
        total = np.maximum(np.bincount(member, length), 1.0)
        value = np.where(_equal(reward, member), 0.0, reward - (np.bincount(member, length * reward) / total)[member])
    elif estimator == "pass_at_k":
        value = _lead(reward, member) / (_deviation(reward, member, count) + STD_EPSILON)
    elif estimator == "grpo":
        value = _grpo(reward, group)
    else:
        value = _centred(reward, member, count)
        if estimator == "rloo":
            value = value * (count / np.maximum(count - 1, 1))[member]
    return value.astype(np.float32)


def _grpo(value: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Normalise the values that are not NaN over their group; 0 for the others."""
    found, present = np.zeros(len(value)), ~np.isnan(value)
    _, member, count = np.unique(group[present], return_inverse=True, return_counts=True)
    some = value[present]
    found[present] = _centred(some, member, count) / (_deviation(some, member, count) + STD_EPSILON)
    return found


def _equal(reward: np.ndarray, member: np.ndarray) -> np.ndarray:
    """Return bool[n]: True if all rewards of the group are equal. Subtracting a rounded mean would leave noise over a tiny deviation."""
    first = reward[np.unique(member, return_index=True)[1]]
    return np.asarray((np.bincount(member, reward != first[member]) == 0)[member])


def _centred(reward: np.ndarray, member: np.ndarray, count: np.ndarray) -> np.ndarray:
    mean = np.bincount(member, reward) / count
    return np.where(_equal(reward, member), 0.0, reward - mean[member])


def _deviation(reward: np.ndarray, member: np.ndarray, count: np.ndarray) -> np.ndarray:
    variance = np.bincount(member, _centred(reward, member, count) ** 2) / np.maximum(count - 1, 1)
    return np.asarray(np.sqrt(variance)[member])


def _lead(reward: np.ndarray, member: np.ndarray) -> np.ndarray:
    """Return the margin of each group's best response over the second best; 0 for other responses and for groups of one."""
    order = np.lexsort((reward, member))
    last = np.append(member[order][1:] != member[order][:-1], True)
    before = np.append(-1, order[:-1])
    best, second = order[last], before[last]
    paired = (second >= 0) & (member[second] == member[best])
    lead = np.zeros(len(reward))
    lead[best] = np.where(paired, reward[best] - reward[second], 0.0)
    return lead


def _normalised(value: np.ndarray, length: np.ndarray) -> np.ndarray:
    tokens = length.sum()
    if tokens < 2 or (value == value[0]).all():
        return np.zeros(len(value))
    centred = value - (length @ value) / tokens
    variance = (length @ centred**2) / (tokens - 1)
    return np.asarray(centred / np.sqrt(variance + VARIANCE_EPSILON))
