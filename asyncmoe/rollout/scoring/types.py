"""Samples, scores, the reasons for a missing score, and the interfaces of scorers and judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from asyncmoe.errors import TrajectoryRejected

if TYPE_CHECKING:
    import numpy as np

ERROR, NAN, TIMEOUT = "scorer_error", "scorer_nan", "scorer_timeout"
GARBAGE, UNAVAILABLE = "scorer_garbage", "scorer_unavailable"
SHOWN = 500
"""Maximum length of an error message in a rejection, in characters."""
MARK = "####"
"""Separates the reasoning from the answer in GSM8K's format: in files of tasks, and in responses of models that learned from them."""

PASSING = frozenset({ERROR, TIMEOUT, UNAVAILABLE})
"""Transient failures, worth a retry. Garbage is not transient: a retry of the same sample would return it again."""


class Later(TrajectoryRejected):
    """No server was reached, or the server asks for a retry (429, 503) after `after_s` seconds (0: it names no time). Nothing has begun."""

    def __init__(self, detail: str, after_s: float = 0.0) -> None:
        self.after_s = after_s
        super().__init__(UNAVAILABLE, detail)


class ScorerRaised(TrajectoryRejected):
    """A user's scorer raised.

    Attributes:
        at: "FILE:LINE" that raised it; where the scorer is defined, if it could not be called.
        trace: the traceback.

    Args:
        said: type and message.
    """

    def __init__(self, reason: str, at: str, said: str, trace: str) -> None:
        self.at, self.trace = at, trace
        super().__init__(reason, f"{said} ({at})")


@dataclass(frozen=True)
class Sample:
    """One agent's part in an episode; T tokens.

    Attributes:
        prompt, answer: the task's question and reference answer.
        response: text of the last turn.
        tokens: all tokens of the conversation, sampled or not.
        sampled: for each token, whether the policy sampled it.
        agent: the agent's name in the environment.
        columns: the example's other columns.
    """

    prompt: str
    response: str
    answer: str
    tokens: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    agent: str = "policy"
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Score:
    """The score of a sample.

    Attributes:
        reward: reward of the whole sample; finite.
        rewards: float32[T]; the score of each step at its last token, NaN elsewhere. None: steps were not scored.
        teacher: float32[T]; the teacher's log-probability, in nats, of each sampled token, 0 elsewhere. None: no teacher.
        why: the scorer's explanation, for readers of samples.
        metrics: other finite numbers about the sample, by name.
    """

    reward: float
    rewards: np.ndarray | None = None
    teacher: np.ndarray | None = None
    why: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Scorer(Protocol):
    """Turns a sample into a score."""

    async def score(self, sample: Sample) -> Score:
        """Return the score of `sample`.

        Raises:
            TrajectoryRejected: "scorer_error": the scorer raised; "scorer_nan": a score is not finite; "scorer_timeout": scoring took too
                long, queueing included; "scorer_garbage": the answer is invalid; "scorer_unavailable": the scorer cannot be reached.
        """

    async def close(self) -> None:
        """Release connections, processes and the user's object."""


class Judge(Protocol):
    """A function, worker processes or an endpoint: computes the raw answer for a sample. `LimitedScorer` calls it, concurrently."""

    async def call(self, sample: Sample) -> object:
        """Return the answer, not yet parsed.

        Raises:
            TrajectoryRejected: "scorer_error", "scorer_timeout" (`scoring.timeout_s`), "scorer_unavailable" or "scorer_garbage".
        """

    async def close(self) -> None:
        """Release connections, processes and the user's object."""


def reason_of(error: BaseException) -> str:
    """Map a user's exception to a rejection reason: "scorer_unavailable" for connection errors and timeouts, else "scorer_error"."""
    return UNAVAILABLE if isinstance(error, (ConnectionError, TimeoutError)) else ERROR
