"""Token advantages of a batch. Every rank sees the metadata of the whole batch, but only its own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import cast

import numpy as np

from asyncmoe.config.objective import Advantage, ObjectiveSection
from asyncmoe.errors import InvariantBroken
from asyncmoe.rpc.item import Item
from asyncmoe.trainer import objective
from asyncmoe.trainer.data import trees
from asyncmoe.trainer.objective import NO_PLUGINS, Plugins, Responses
from asyncmoe.trajectory import Trajectory

_NOT_NORMALISED = ("dr_grpo", "rloo", "opo")
"""Estimators whose advantages are in units of reward."""


def roles(items: Sequence[Item]) -> list[int]:
    """Number the comparison groups: trajectories of the same prompt and agent get the same number."""
    known: dict[tuple[int, int], int] = {}
    return [known.setdefault((item.group, item.agent), len(known)) for item in items]


def outcome_advantages(
    items: Sequence[Item], section: ObjectiveSection, plugins: Plugins = NO_PLUGINS
) -> tuple[np.ndarray, dict[str, float]]:
    """Compute the outcome advantage of every path of a batch, float32[n], and the metrics of a user's own function.

        objective.advantage of the tree + advantage of the path within its tree

    Trees, not paths, are compared with each other, so that an episode counts once however often it forked: a tree's reward is the mean over
    its paths. A path is compared with the other paths of its tree by r - mean, divided by (sample deviation + 1e-6) for the estimators that
    normalise; this is exactly 0 if the rewards of the paths are equal, as they are unless an agent scores them one by one. (Tree-GRPO,
    arXiv 2509.21240, also adds an advantage between trees and one within them.)

    Raises:
        ConfigError: the user's own function fails.
    """
    tree = trees.numbers(items)
    every = trees.members(tree)
    of_tree, metrics = _tree_advantages([[items[i] for i in paths] for paths in every], trees.metrics(items), section, plugins)
    if len(every) == len(items):
        return of_tree, metrics
    within: Advantage = "dr_grpo" if plugins.advantage is not None or section.advantage in _NOT_NORMALISED else "grpo"
    return of_tree[tree] + objective.group_advantages([i.reward for i in items], tree, within), metrics


def _tree_advantages(
    every: Sequence[Sequence[Item]], metrics: Sequence[Mapping[str, float]], section: ObjectiveSection, plugins: Plugins
) -> tuple[np.ndarray, dict[str, float]]:
    role = roles([paths[0] for paths in every])
    rewards = [paths[0].reward if len(paths) == 1 else fmean(path.reward for path in paths) for paths in every]
    sampled = [sum(path.sampled for path in paths) for paths in every]
    named = {name: np.array([one.get(name, np.nan) for one in metrics]) for name in sorted(set().union(*metrics))}
    if plugins.advantage is None:
        parts = _weighed(named, section, len(rewards)) if section.advantage == "gdpo" else ()
        return objective.group_advantages(rewards, role, cast(Advantage, section.advantage), sampled, parts), {}
    responses = Responses.of(
        named,
        rewards=rewards,
        groups=role,
        sampled=sampled,
        tokens=[sum(path.tokens - path.forked for path in paths) for paths in every],
        oldest_versions=[min(path.oldest_version for path in paths) for paths in every],
        newest_versions=[max(path.newest_version for path in paths) for paths in every],
    )
    value, reported = plugins.advantage.of_responses(responses)
    return value, {f"{plugins.advantage.short}/{name}": metric for name, metric in reported.items()}


def _weighed(named: Mapping[str, np.ndarray], section: ObjectiveSection, count: int) -> list[tuple[float, np.ndarray]]:
    """Return weight and values of each metric that gdpo sums; empty: no metric has a weight of its own, and no response has a metric."""
    weights = (section.advantage_options or {}).get("weights") or dict.fromkeys(named, 1.0)
    return [(weight, named.get(name, np.full(count, np.nan))) for name, weight in weights.items()]


def relatives(items: Sequence[Item], wanted: Sequence[int], section: ObjectiveSection) -> list[int]:
    """Return the batch positions of the other trajectories that `token_advantages` of the `wanted` ones needs: with process supervision,
    a shared token's advantage depends on the later steps of every path through it."""
    if not section.process.weight:
        return []
    tree = trees.numbers(items)
    own, mine = set(wanted), {tree[i] for i in wanted}
    return [i for i, number in enumerate(tree) if number in mine and i not in own]


def token_advantages(
    items: Sequence[Item],
    trajectories: Mapping[int, Trajectory],
    section: ObjectiveSection,
    outcome: np.ndarray,
    others: Mapping[int, Trajectory],
) -> dict[int, np.ndarray]:
    """Compute the token advantages of some trajectories of a batch: float32[T] by position in the batch.

        objective.advantage of the rewards + process.weight * step advantages + distill.weight * teacher advantages

    (`outcome_advantages`, `process_advantages`, `distill_advantages`). Trajectories are compared within their `roles`. A token that several
    paths share has the mean of its advantages in these paths.

    Args:
        items: metadata of the whole batch.
        trajectories: the wanted trajectories, by position in the batch.
        outcome: float32[n]: the result of `outcome_advantages`.
        others: the `relatives` of these trajectories, by position in the batch.

    Raises:
        InvariantBroken: a trajectory lacks the step rewards or teacher log-probabilities that a weight above 0 needs; such trajectories
            are rejected on intake.
    """
    steps = _step_advantages(items, {**trajectories, **others}, section) if section.process.weight else {}
    every = {i: paths for paths in trees.members(trees.numbers(items)) for i in paths}
    found = {}
    for i, t in trajectories.items():
        paths = every[i]
        if len(paths) == 1:
            value = np.full(len(t), float(outcome[i])) + steps.get(i, 0.0)
        else:
            each = [np.array([float(outcome[j])]) + steps.get(j, 0.0) for j in paths]
            value = trees.mean_over_paths(each, trees.shared([items[j] for j in paths]), paths.index(i))
        if section.distill.weight:
            if t.teacher is None:
                raise InvariantBroken(
                    f"{t.key} has no teacher's log-probabilities, but objective.distill.weight is {section.distill.weight:g}"
                )
            value += section.distill.weight * objective.distill_advantages(t.teacher, t.logprobs, section.distill.clip)
        found[i] = value.astype(np.float32)
    return found


def _step_advantages(items: Sequence[Item], trajectories: Mapping[int, Trajectory], section: ObjectiveSection) -> dict[int, np.ndarray]:
    """Return process.weight * step advantages along each whole path, shared steps included: float64[T] by position in the batch."""
    mean, deviation = objective.step_scales(
        [i.steps for i in items], [i.step_mean for i in items], [i.step_squares for i in items], roles(items)
    )
    tree, along, found = trees.numbers(items), dict[tuple[int, int], np.ndarray](), {}
    for i in sorted(trajectories, key=lambda i: (tree[i], items[i].branch)):
        t, item = trajectories[i], items[i]
        if t.rewards is None:
            raise InvariantBroken(f"{t.key} has no step rewards, but objective.process.weight is {section.process.weight:g}")
        rewards = t.rewards if not item.forked else np.concatenate([along[tree[i], item.parent][: item.forked], t.rewards[item.forked :]])
        along[tree[i], item.branch] = rewards
        found[i] = section.process.weight * objective.process_advantages(rewards, mean[i], deviation[i])
    return found


def credit_figures(items: Sequence[Item]) -> dict[str, float | None]:
    """Return `step_reward_mean` and `kl_teacher` of `telemetry.schema.Step`; None if the batch has no step rewards or no teacher."""
    steps = sum(item.steps for item in items)
    gaps = [(item.teacher_gap, item.sampled) for item in items if item.teacher_gap is not None]
    return {
        "step_reward_mean": sum(item.steps * item.step_mean for item in items) / steps if steps else None,
        "kl_teacher": sum(gap for gap, _ in gaps) / sum(sampled for _, sampled in gaps) if gaps else None,
    }
