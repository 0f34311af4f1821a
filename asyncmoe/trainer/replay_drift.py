"""How far a trainer that trains a batch again is from the one that trained it first. Pure.

Training again is not exact to the bit on most machines, so the weights of step k are others than those with which engines sampled
version k. The engines recorded the log-probabilities of then. On tokens of version k, the difference from the trainer's at step k is how
far the weights have drifted, beside what engine and trainer differ by anyway (`verify.logprobs_every`) and what earlier versions left in
the keys and values of the tokens before. A checkpoint that is not the run's, or an optimizer state that was not restored, shows here before
the batch is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncmoe.errors import Disagreement
from asyncmoe.trajectory import Trajectory


@dataclass(frozen=True)
class Drift:
    """Differences over `tokens` sampled tokens; `total`: sum of |trainer again - engine then| in nats."""

    tokens: int = 0
    total: float = 0.0


def measure(trajectories: Sequence[Trajectory], ours: Sequence[np.ndarray], version: int) -> Drift:
    """Compare the tokens that `version` sampled.

    Args:
        ours: float32[T_i] for each trajectory; the trainer's log-probabilities, aligned with the tokens.
    """
    drift = Drift()
    for t, values in zip(trajectories, ours, strict=True):
        sampled = t.loss_mask & (t.versions == version)
        apart = np.abs(values[sampled].astype(np.float64) - t.logprobs[sampled])
        drift = Drift(drift.tokens + len(apart), drift.total + float(apart.sum()))
    return drift


def judge(parts: Iterable[Drift], step: int, most: float) -> float | None:
    """Return the mean |difference| in nats a token; None if the batch has no token of version `step`.

    Args:
        parts: of all ranks, over disjoint sets of tokens.
        most: `verify.max_replay_drift`.

    Raises:
        Disagreement: it is above `most`, or not a number.
    """
    every = list(parts)
    tokens = sum(part.tokens for part in every)
    if not tokens:
        return None
    mean = sum(part.total for part in every) / tokens
    if not mean <= most:
        raise Disagreement(
            f"step {step} is trained again, and its log-probabilities differ by {mean:.3e} a token from those of the first time, "
            f"over {tokens} tokens; verify.max_replay_drift is {most:g}. Nothing was trained on the batch. The checkpoint and the "
            "journal do not belong together, or the checkpoint was not restored as a whole"
        )
    return mean
