"""The advantages of a batch's tokens: of what is compared with what every rank knows everything, of the tokens only its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.errors import InvariantBroken
from asyncmoe.rpc.messages import Item
from asyncmoe.trainer import objective
from asyncmoe.trajectory import Trajectory


def roles(items: Sequence[Item]) -> list[int]:
    """For each trajectory of a batch, which ones it is compared with: those of the same prompt and agent have the same number."""
    known: dict[tuple[int, int], int] = {}
    return [known.setdefault((item.group, item.agent), len(known)) for item in items]


def token_advantages(items: Sequence[Item], trajectories: Mapping[int, Trajectory], section: ObjectiveSection) -> dict[int, np.ndarray]:
    """Advantages of the tokens of some trajectories of a batch: float32[T] by position in it.

        objective.advantage of the outcomes + process.weight * what the steps add + distill.weight * what the teacher adds

    (`objective.group_advantages`, `process_advantages`, `distill_advantages`), compared within `roles`.

    Args:
        items: the whole batch.
        trajectories: those wanted.

    Raises:
        InvariantBroken: one lacks the step rewards or the teacher that a weight above 0 needs; they are refused where trajectories are
            taken in.
    """
    role = roles(items)
    outcome = objective.group_advantages([i.reward for i in items], role, section.advantage, [i.sampled for i in items])
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
    """`step_reward_mean` and `kl_teacher` of a batch, as `telemetry.schema.Step` has them; None where nothing was rewarded or taught."""
    steps = sum(item.steps for item in items)
    gaps = [(item.teacher_gap, item.sampled) for item in items if item.teacher_gap is not None]
    return {
        "step_reward_mean": sum(item.steps * item.step_mean for item in items) / steps if steps else None,
        "kl_teacher": sum(gap for gap, _ in gaps) / sum(sampled for _, sampled in gaps) if gaps else None,
    }
