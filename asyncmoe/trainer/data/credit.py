"""Token advantages of a batch. Every rank sees the metadata of the whole batch, but only its own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from asyncmoe.config.objective import Advantage, ObjectiveSection
from asyncmoe.errors import InvariantBroken
from asyncmoe.rpc.messages import Item
from asyncmoe.trainer import objective
from asyncmoe.trainer.objective import NO_PLUGINS, Plugins, Responses
from asyncmoe.trajectory import Trajectory


def roles(items: Sequence[Item]) -> list[int]:
    """Number the comparison groups: trajectories of the same prompt and agent get the same number."""
    known: dict[tuple[int, int], int] = {}
    return [known.setdefault((item.group, item.agent), len(known)) for item in items]


def outcome_advantages(
    items: Sequence[Item], section: ObjectiveSection, plugins: Plugins = NO_PLUGINS
) -> tuple[np.ndarray, dict[str, float]]:
    """Compute `objective.advantage` of every response of a batch, float32[n], and the metrics that a user's own function reports.

    Raises:
        ConfigError: the user's own function fails.
    """
    role, rewards, sampled = roles(items), [i.reward for i in items], [i.sampled for i in items]
    if plugins.advantage is None:
        return objective.group_advantages(rewards, role, cast(Advantage, section.advantage), sampled), {}
    responses = Responses.of(
        rewards=rewards,
        groups=role,
        sampled=sampled,
        tokens=[i.tokens for i in items],
        oldest_versions=[i.oldest_version for i in items],
        newest_versions=[i.newest_version for i in items],
    )
    value, metrics = plugins.advantage.of_responses(responses)
    return value, {f"{plugins.advantage.short}/{name}": metric for name, metric in metrics.items()}


def token_advantages(
    items: Sequence[Item], trajectories: Mapping[int, Trajectory], section: ObjectiveSection, outcome: np.ndarray | None = None
) -> dict[int, np.ndarray]:
    """Compute the token advantages of some trajectories of a batch: float32[T] by position in the batch.

        objective.advantage of the rewards + process.weight * step advantages + distill.weight * teacher advantages

    (`outcome_advantages`, `process_advantages`, `distill_advantages`). Trajectories are compared within their `roles`.

    Args:
        items: metadata of the whole batch.
        trajectories: the wanted trajectories, by position in the batch.
        outcome: float32[n]: the result of `outcome_advantages`; None: compute it, without plug-ins.

    Raises:
        InvariantBroken: a trajectory lacks the step rewards or teacher log-probabilities that a weight above 0 needs; such trajectories
            are rejected on intake.
    """
    role = roles(items)
    outcome = outcome_advantages(items, section)[0] if outcome is None else outcome
    mean, deviation = objective.step_scales([i.steps for i in items], [i.step_mean for i in items], [i.step_squares for i in items], role)
    found = {}
    for i, t in trajectories.items():
        value = np.full(len(t), float(outcome[i]))
        if section.process.weight:
            if t.rewards is None:
                raise InvariantBroken(f"{t.key} has no step rewards, but objective.process.weight is {section.process.weight:g}")
            value += section.process.weight * objective.process_advantages(t.rewards, mean[i], deviation[i])
        if section.distill.weight:
            if t.teacher is None:
                raise InvariantBroken(
                    f"{t.key} has no teacher's log-probabilities, but objective.distill.weight is {section.distill.weight:g}"
                )
            value += section.distill.weight * objective.distill_advantages(t.teacher, t.logprobs, section.distill.clip)
        found[i] = value.astype(np.float32)
    return found


def credit_figures(items: Sequence[Item]) -> dict[str, float | None]:
    """Return `step_reward_mean` and `kl_teacher` of `telemetry.schema.Step`; None if the batch has no step rewards or no teacher."""
    steps = sum(item.steps for item in items)
    gaps = [(item.teacher_gap, item.sampled) for item in items if item.teacher_gap is not None]
    return {
        "step_reward_mean": sum(item.steps * item.step_mean for item in items) / steps if steps else None,
        "kl_teacher": sum(gap for gap, _ in gaps) / sum(sampled for _, sampled in gaps) if gaps else None,
    }
