"""Trees of turns in a batch: which trajectories are paths of one tree, and how many tokens two paths share.

A tree is one agent's part in one episode; an agent that was never forked is a tree of one path. All trajectories of a tree are in the same
batch, and every rank has the metadata of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncmoe.config.objective import Aggregation
from asyncmoe.errors import InvariantBroken
from asyncmoe.rpc.item import Item
from asyncmoe.telemetry.measured import means
from asyncmoe.trainer import objective


def numbers(items: Sequence[Item]) -> list[int]:
    """Number the trees of a batch: trajectories of the same tree get the same number, from 0 in order of appearance."""
    known: dict[tuple[int, int, int], int] = {}
    return [known.setdefault((item.group, item.episode, item.agent), len(known)) for item in items]


def members(tree: Sequence[int]) -> list[list[int]]:
    """Return the positions in the batch of each tree's paths; `tree`: the result of `numbers`."""
    found: list[list[int]] = [[] for _ in range(max(tree, default=-1) + 1)]
    for i, number in enumerate(tree):
        found[number].append(i)
    return found


def totals(values: Sequence[float], tree: Sequence[int]) -> np.ndarray:
    """Return the sum of `values` [n] over the paths of each tree: float64[trees]."""
    return np.bincount(np.asarray(tree, np.int64), np.asarray(values, np.float64))


def rewards(items: Sequence[Item]) -> np.ndarray:
    """Return the reward of each tree of a batch, the mean over its paths: float64[trees]."""
    tree = numbers(items)
    return np.asarray(totals([item.reward for item in items], tree) / np.bincount(tree))


def metrics(items: Sequence[Item]) -> list[dict[str, float]]:
    """Return the metrics of each tree of a batch, the means over the paths that have them."""
    return [means(items[i].metrics for i in paths) for paths in members(numbers(items))]


def token_weights(items: Sequence[Item], aggregation: Aggregation, max_new_tokens: int) -> np.ndarray:
    """Return the loss weight of each trajectory's sampled tokens: float64[n]. All paths of a tree count as one sequence, because each of
    its tokens is trained once (`objective.token_weights`)."""
    tree = numbers(items)
    groups = [items[paths[0]].group for paths in members(tree)]
    sampled = totals([item.sampled for item in items], tree).astype(int).tolist()
    weights = objective.token_weights(sampled, aggregation, groups, max_new_tokens)
    return np.asarray(weights[tree] * np.array([item.weight for item in items]))


def shared(paths: Sequence[Item]) -> np.ndarray:
    """Return the length of the prefix that any two paths of a tree share: int64[n, n]; the path's own length on the diagonal.

    Let p be the parent of j, and i another path before j. No earlier path shares more with j than p does, so i and j share what i and p
    share, but at most what j and p share.

    Raises:
        InvariantBroken: a path comes before its parent, or two paths have the same number.
    """
    place = {item.branch: i for i, item in enumerate(paths)}
    found = np.diag([item.tokens for item in paths]).astype(np.int64)
    if len(place) != len(paths):
        raise InvariantBroken(f"tree of {paths[0].key}: two paths with the same number")
    for j, item in enumerate(paths):
        if not item.forked:
            continue
        parent = place.get(item.parent, j)
        if parent >= j:
            raise InvariantBroken(f"{item.key}: its parent, path {item.parent}, does not come before it")
        found[j, :j] = np.minimum(found[parent, :j], item.forked)
        found[:j, j] = found[j, :j]
    return found


def mean_over_paths(values: Sequence[np.ndarray], common: np.ndarray, which: int) -> np.ndarray:
    """Return, for each token of a path, the mean of its values in all paths that go through it: float64[T].

    Args:
        values: for each path of the tree, float[its tokens], or [1] for the same value at all of them.
        common: the result of `shared`.
        which: the path.
    """
    size = int(common[which, which])
    total, count = np.zeros(size), np.zeros(size)
    for value, through in zip(values, common[which].tolist(), strict=True):
        total[:through] += value if len(value) == 1 else value[:through]
        count[:through] += 1
    return np.asarray(total / count)
