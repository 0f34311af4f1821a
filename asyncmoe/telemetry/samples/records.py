"""The records of sampled trajectories, one JSON object per line.

samples/rollout.jsonl  Begin once per start of the controller, SampledGroup, Stale; written by the controller
samples/trainer.jsonl  Begin once per start of the trainer, Trained; written by trainer rank 0

A trajectory's records in the two files have the same key and digest: the key identifies the trajectory within one start of a run, the
digest of the engine's report distinguishes starts. Log-probabilities are natural, rounded to 5 decimals.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

FOLDER, ROLLOUT_SAMPLES, TRAINER_SAMPLES = "samples", "rollout.jsonl", "trainer.jsonl"
MOST_TOKENS = 8192
"""Maximum tokens kept of a prompt, and of the rest of its trajectory; if there are more, the middle is left out."""
MOST_BYTES = 256 << 20
"""Bound on the size of the folder, half of it for each file. Once a file is full, a warning is logged and it gets no more groups."""

Role = Literal["prompt", "response", "observation"]
Fate = Literal["queued", "dropped", "rejected"]
Value = float | None
"""A number; None if it was not finite, which JSON cannot represent."""

TRAINED, CLIPPED, CAPPED, NO_WEIGHT = ".", "c", "w", "p"
REJECTED: Mapping[str, str] = {
    "b": "token_band",
    "s": "sequence_band",
    "g": "geometric_band",
    "v": "veto",
    "o": "opsm",
    "a": "max_age",
    NO_WEIGHT: "a weight of 0",
}
"""Letters of `Trained.states` for tokens that are not trained on, and the rule of objective.correction that rejects them."""


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", omit_defaults=True):
    """Base of all records."""

    time: float
    """Unix seconds."""


class Begin(SampleRecord, frozen=True, kw_only=True, tag="begin"):
    """The process begins after `step` optimizer steps. If records before this line are of later steps, those steps were trained again."""

    step: int


class Full(SampleRecord, frozen=True, kw_only=True, tag="full"):
    """The file has reached its bound; only asyncmoe 0.1 wrote this record, as the last line."""


class Stretch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Consecutive tokens; if there are too many, the middle is left out.

    Attributes:
        tokens: ids of the kept tokens.
        pieces: their texts, whose concatenation is the text; of a character spread over several tokens, only the last has a text.
        left_out: number of tokens left out.
        after: number of kept tokens before the gap.
    """

    tokens: Sequence[int] = ()
    pieces: Sequence[str] = ()
    left_out: int = 0
    after: int = 0


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call of a tool, in calling order. `name`: None for an invalid call."""

    name: str | None
    argument: str
    observation: str
    seconds: float


class SampledMember(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One agent's part in an episode, or one path of its tree of turns: T tokens, S of them sampled. Responses that are trained in another
    path count as observations.

    Attributes:
        key: name of the trajectory.
        branch: number of the path in the agent's tree.
        parent, forked: the path begins with the first `forked` tokens of path `parent` of the same tree, and these are trained there; 0:
            not forked.
        name: the agent's name in its environment.
        shared: True if it begins with the group's prompt, whose tokens are not repeated in `rest`.
        rest: its tokens, without the shared ones.
        roles: (role, number) of consecutive tokens, T in all, including shared ones and those left out.
        logprobs: the engine's log-probability of each kept sampled token.
        versions: (weight version, number) of consecutive sampled tokens, S in all.
        finish: why its last response ended: "stop" or "length"; "" without a response.
        reward: None if it was not scored.
        metrics: other numbers that were measured, by name.
        rewards: (index of a step's last token, reward of the step).
        teacher: the teacher's log-probability of each kept sampled token.
        seconds: duration of each stage, by name.
        digest: see `digest_of`; None if the trajectory is incomplete.
        why: the scorer's explanation of the reward.
        failure: why it was rejected, or "cancelled": its group had failed or was complete.
    """

    key: str
    episode: int
    agent: int = 0
    branch: int = 0
    parent: int = 0
    forked: int = 0
    attempt: int = 0
    name: str = ""
    shared: bool = False
    rest: Stretch = Stretch()
    roles: Sequence[tuple[Role, int]] = ()
    logprobs: Sequence[Value] = ()
    versions: Sequence[tuple[int, int]] = ()
    finish: str = ""
    reward: float | None = None
    metrics: Mapping[str, float] = {}
    rewards: Sequence[tuple[int, float]] = []
    teacher: Sequence[Value] = []
    calls: Sequence[ToolCall] = ()
    seconds: Mapping[str, float] = {}
    digest: int | None = None
    why: str = ""
    failure: str = ""


class SampledGroup(SampleRecord, frozen=True, kw_only=True, tag="group"):
    """All responses to one prompt, written when the group was complete or had failed.

    Attributes:
        group: number of its prompt.
        attempt: number of times it was started before.
        fate: "queued" groups wait for the trainer; a `Trained` or `Stale` record has their outcome.
        reason, detail: why it was dropped or rejected: the name it is counted under, and a sentence.
        version: weight version that the engines served.
        question, answer: the task's text and reference answer.
        prompt: tokens that the members share.
    """

    group: int
    attempt: int = 0
    fate: Fate
    reason: str = ""
    detail: str = ""
    version: int
    question: str
    answer: str
    prompt: Stretch = Stretch()
    members: Sequence[SampledMember] = ()


class Stale(SampleRecord, frozen=True, kw_only=True, tag="stale"):
    """A queued group left the queue untrained, because its oldest token was sampled by version `oldest` and the trainer had version
    `version`."""

    group: int
    attempt: int = 0
    fate: Literal["dropped", "requeued"]
    reason: str
    version: int
    oldest: int


class Trained(SampleRecord, frozen=True, kw_only=True, tag="trained"):
    """The trainer's values for a trajectory's sampled tokens, in order; if there are many, only the first and last ones, as many as
    `choice.kept` returns.

    Attributes:
        step: as in `telemetry.schema.Step`.
        version: weight version before the step.
        logprobs: the trainer's log-probability when it trained on the token.
        advantages: one number if it is the same for all.
        weights: importance weights of objective.correction; one number if they are the same for all.
        states: a letter for each token: `TRAINED`; `CLIPPED`: the clip acts on the token; `CAPPED`: trained with a capped weight; or one of
            `REJECTED`.
        mismatch: number of layers in which the trainer's router would have chosen other experts than the engine's; empty if routing is not
            kept.
        layers: number of layers with experts.
    """

    step: int
    version: int
    key: str
    digest: int
    logprobs: Sequence[Value]
    advantages: float | Sequence[Value]
    weights: float | Sequence[Value] = 1.0
    states: str
    mismatch: Sequence[int] = []
    layers: int = 0


def digest_of(tokens: np.ndarray, logprobs: np.ndarray) -> int:
    """Return the CRC-32 of a trajectory's tokens (int32[T]) and the engine's log-probabilities (float32[T])."""
    return zlib.crc32(np.ascontiguousarray(logprobs).tobytes(), zlib.crc32(np.ascontiguousarray(tokens).tobytes()))


def rounded(values: np.ndarray) -> list[float]:
    """Round numbers for writing; those that are not finite are written as null."""
    found: list[float] = np.round(np.asarray(values, np.float64), 5).tolist()
    return found
