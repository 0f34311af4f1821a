"""The trajectory: the unit of data that flows from the engines to the trainer.

A sampled token's values are written once, by the forward pass that sampled it, and never change afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from asyncmoe.trajectory.masks import EncodedMasks
from asyncmoe.trajectory.routes import Routes, Routing

NOT_SAMPLED = -1
"""Value of `versions` for a token that the policy did not sample (prompt, observation)."""

ARRAYS = {"tokens": "<i4", "loss_mask": "|b1", "logprobs": "<f4", "versions": "<i4"}
"""Required arrays over T tokens, with their dtypes."""
OPTIONAL = {"rewards": "<f4", "teacher": "<f4"}
"""Optional arrays over T tokens, with their dtypes."""
TOP = np.dtype([("logprob", "<f4"), ("id", "<i4")])
"""An element of `Trajectory.top`."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Prompt and response of one policy in one episode; T tokens in all.

    Attributes:
        key: unique name within a run, e.g. "g12.e3.a0.t0" (group, episode, agent, attempt); further paths of an agent's tree add their
            number: "g12.e3.a0.b1.t0".
        group: number shared by all episodes of a prompt; advantages are computed within a group.
        tokens: int32[T].
        loss_mask: bool[T]; True where this policy sampled the token and no other trajectory trains it. False for prompt and observation
            tokens, and for the first `forked` tokens.
        logprobs: float32[T]; behaviour log-probability in nats, after temperature; 0 where `loss_mask` is False.
        versions: int32[T]; weight version that sampled the token, `NOT_SAMPLED` where `loss_mask` is False.
        reward: scalar reward of the episode.
        metrics: other finite numbers that its scorer, environment or agent measured, by name.
        finish: why generation ended: "stop" or "length".
        prefix_version: the version from which all keys and values of the prompt are known to come, or `NOT_SAMPLED` if a prefix
            cached under another version may have been used.
        agent: number of the agent in its episode, the same for all paths of its tree.
        branch: number of this path in the tree; 0 if the agent was never forked.
        parent: number of the earlier path that trains, directly or through its own parent, the tokens this path shares with it; 0 if none
            are shared.
        forked: number of leading tokens shared with the parent; 0 if none.
        seconds: duration of each stage of this trajectory, by name.
        routes: the experts of the first T - 1 tokens (the last token has not passed through the model), if recorded.
        masks: the ids from which each of the T tokens was sampled, if recorded.
        top: TOP[n, K], if recorded: the K ids that were most probable at each of the n tokens in `loss_mask`, with log-probabilities like
            `logprobs`: -inf for an id outside the token's mask.
        rewards: float32[T], if steps were rewarded: the reward of each step at its last token, NaN at all other tokens. (A step with
            reward 0 counts in its group's mean.)
        teacher: float32[T], if there is a teacher: its log-probability in nats of each sampled token, over its whole vocabulary; 0
            where `loss_mask` is False.
    """

    key: str
    group: int
    episode: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    finish: str
    prefix_version: int = NOT_SAMPLED
    agent: int = 0
    branch: int = 0
    parent: int = 0
    forked: int = 0
    attempt: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    routes: Routes | None = None
    masks: EncodedMasks | None = None
    top: np.ndarray | None = None
    rewards: np.ndarray | None = None
    teacher: np.ndarray | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token, to which the consumption rule applies. `NOT_SAMPLED` for a demonstration."""
        sampled = self.versions[self.versions != NOT_SAMPLED]
        return int(sampled.min()) if len(sampled) else NOT_SAMPLED

    @property
    def is_pure(self) -> bool:
        """Whether every key, value and token is known to come from one weight version."""
        sampled = self.versions[self.versions != NOT_SAMPLED]
        return len(sampled) > 0 and bool((sampled == self.prefix_version).all())


@dataclass(frozen=True)
class Recording:
    """The data that engines must return and that a sampled trajectory must carry to be trained on.

    Attributes:
        routing: the model's routing, if the experts of every token are recorded; None: they are not.
        masks: whether the ids from which every token was sampled are recorded, and log-probabilities are over these ids; if false, they are
            over the whole vocabulary.
        vocabulary: size of the vocabulary; None: token ids are not checked.
        rewards: whether steps have rewards.
        teacher: whether a teacher supplies log-probabilities.
        top: number of most probable ids recorded at every sampled token; 0: none.
    """

    routing: Routing | None = None
    masks: bool = False
    vocabulary: int | None = None
    rewards: bool = False
    teacher: bool = False
    top: int = 0


NOTHING = Recording()
"""No additional data."""
