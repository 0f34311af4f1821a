"""What is scored, what a score is, and the reasons for which there may be none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

ERROR, NAN, TIMEOUT = "scorer_error", "scorer_nan", "scorer_timeout"
GARBAGE, UNAVAILABLE = "scorer_garbage", "scorer_unavailable"

PASSING = frozenset({ERROR, TIMEOUT, UNAVAILABLE})
"""Failures that another call may not meet. The same sample would be answered with the same garbage again."""
OUT_OF_ORDER = frozenset({TIMEOUT, UNAVAILABLE})
"""Failures that say something about whoever scores, not about the sample."""


@dataclass(frozen=True)
class Sample:
    """One agent's part in an episode; T tokens.

    Attributes:
        prompt, answer: the question and the reference of the task.
        response: text of the last turn.
        tokens: the whole conversation, given and sampled.
        sampled: for each of them whether the policy sampled it.
        agent: its name in the environment.
    """

    prompt: str
    response: str
    answer: str
    tokens: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    agent: str = "policy"


@dataclass(frozen=True, eq=False)
class Score:
    """What a sample is worth.

    Attributes:
        reward: of the whole sample; finite.
        rewards: float32[T]; the score of each step at its last token, NaN elsewhere. None: steps were not scored.
        teacher: float32[T]; the teacher's log-probability, in nats, of each sampled token, 0 elsewhere. None: there is no teacher.
    """

    reward: float
    rewards: np.ndarray | None = None
    teacher: np.ndarray | None = None


class Scorer(Protocol):
    """Turns a sample into a score."""

    async def score(self, sample: Sample) -> Score:
        """What it is worth.

        Raises:
            TrajectoryRejected: "scorer_error": it raised; "scorer_nan": it is not finite; "scorer_timeout": it took too long, waiting for
                its turn included; "scorer_garbage": it answered with what is no score; "scorer_unavailable": it cannot be reached.
        """
        ...

    async def close(self) -> None:
        """End what it started."""
        ...


@runtime_checkable
class Teaches(Protocol):
    """A scorer with a teacher, which is asked also where the environment has the reward."""

    async def teach(self, sample: Sample) -> np.ndarray | None:
        """`Score.teacher` alone. Raises as `Scorer.score`."""
        ...
