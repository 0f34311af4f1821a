"""The queue's metadata of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping

from asyncmoe.log.log import Place
from asyncmoe.rpc.base import Message


class Item(Message, frozen=True):
    """A leased trajectory without its arrays."""

    key: str
    group: int
    episode: int
    agent: int
    """Number of the agent; a group compares responses of the same agent."""
    tokens: int
    sampled: int
    """Tokens with loss_mask True."""
    reward: float
    oldest_version: int
    newest_version: int
    weight: float = 1.0
    """Factor on the weight that the aggregation gives its tokens; less than 1 only under the downweight rule."""
    steps: int = 0
    """Number of rewarded steps."""
    step_mean: float = 0.0
    """Mean reward of the steps; exact if all their rewards are equal."""
    step_squares: float = 0.0
    """Sum of squared deviations of the steps' rewards from `step_mean`."""
    teacher_gap: float | None = None
    """Sum over sampled tokens of (engine's - teacher's) log-probability, in nats; None without a teacher."""
    branch: int = 0
    """This and the next two: as in `Trajectory`."""
    parent: int = 0
    forked: int = 0
    truncated: bool = False
    """Whether its last response ended at a token limit."""
    metrics: Mapping[str, float] = {}
    """As in `Trajectory`."""
    place: Place | None = None
    """Place of its group in the log, once written. The rollout worker that wrote it, or that worker's replacement, has the arrays."""
