"""Build the trajectory of an agent from its turns, as the engine answered them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncmoe.engines.decode import routed_experts, sampling_masks
from asyncmoe.engines.types import Generation
from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.log.turns import EpisodeId as EpisodeId
from asyncmoe.trajectory import NOT_SAMPLED, EncodedMasks, Masks, Recording, Routes, Trajectory, encode_masks
from asyncmoe.trajectory.sent_routes import joined


@dataclass(frozen=True)
class PlaceInTree:
    """The position of a trajectory in its episode.

    Attributes:
        agent, branch, parent: as in `Trajectory`.
        shared: number of its first turns that it shares with the parent, which trains them.
    """

    agent: int = 0
    branch: int = 0
    parent: int = 0
    shared: int = 0


FIRST = PlaceInTree()
"""The only path of the only agent."""


@dataclass(frozen=True)
class Turn:
    """One request and its response.

    Attributes:
        given: tokens before the response that are in no earlier turn: the prompt, an observation.
        generation: the response to all tokens so far.
        salt: version under which the engine's prefix cache keeps its prompt.
    """

    given: tuple[int, ...]
    generation: Generation
    salt: int

    def __len__(self) -> int:
        return len(self.given) + len(self.generation.tokens)


def sampled(turns: Sequence[Turn]) -> np.ndarray:
    """Return bool[T] over the tokens of some turns, True for those that the policy sampled."""
    return np.concatenate([np.arange(len(turn)) >= len(turn.given) for turn in turns])


def step_rewards(credits: Mapping[int, float], size: int) -> np.ndarray:
    """Return `Trajectory.rewards` of `size` tokens. `credits`: the reward of each step by the index of its last token."""
    rewards = np.full(size, np.nan, np.float32)
    rewards[list(credits)] = list(credits.values())
    return rewards


def assemble(
    turns: Sequence[Turn],
    place: EpisodeId,
    recording: Recording,
    reward: float,
    seconds: dict[str, float],
    path: PlaceInTree = FIRST,
    rewards: np.ndarray | None = None,
    teacher: np.ndarray | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Trajectory:
    """Build the trajectory of one path of an agent in an episode. Each turn's routes start at the last token of the earlier turns, which
    had not yet passed through the model. Shared turns become context: no token of theirs counts as sampled here.

    `prefix_version` is the salt of all turns if that version also sampled the first token of each turn. Then that version computed
    everything that the turns read from the prefix cache: no earlier version did, because requests carry the salt only while the version is
    served, and no later one, because a turn reads the cache before its first token is sampled.

    Args:
        rewards, teacher: as in `Trajectory`, but including shared turns.
        metrics: as in `Trajectory`.

    Raises:
        TrajectoryRejected: "bad_version" if a span's version is not a version of this run; or see `routed_experts`,
            `sampling_masks` and `encode_masks`.
    """
    key, forked = place.key(path.agent, path.branch), sum(map(len, turns[: path.shared]))
    versions = [_versions(turn, key) for turn in turns]
    salts = {turn.salt for turn in turns} | {int(v[len(turn.given)]) for turn, v in zip(turns, versions, strict=True)}
    return Trajectory(
        key=key,
        group=place.group,
        episode=place.episode,
        agent=path.agent,
        branch=path.branch,
        parent=path.parent,
        forked=forked,
        attempt=place.attempt,
        tokens=np.concatenate([part for turn in turns for part in (np.array(turn.given, np.int32), turn.generation.tokens)]),
        loss_mask=_without(sampled(turns), forked, False),
        logprobs=_without(_logprobs(turns), forked, 0.0),
        versions=_without(np.concatenate(versions), forked, NOT_SAMPLED),
        reward=reward,
        metrics=dict(metrics or {}),
        finish=turns[-1].generation.finish,
        prefix_version=salts.pop() if len(salts) == 1 else NOT_SAMPLED,
        seconds=seconds,
        routes=_routes(turns, recording, key),
        masks=_masks(turns, recording, key, path.shared),
        top=_top(turns[path.shared :], recording, key),
        rewards=None if rewards is None else _without(rewards, forked, np.nan),
        teacher=None if teacher is None else _without(teacher, forked, 0.0),
    )


def _without(values: np.ndarray, forked: int, blank: float) -> np.ndarray:
    """Return a copy of `values` with the first `forked` replaced by `blank`."""
    made = values.copy()
    made[:forked] = blank
    return made


def _logprobs(turns: Sequence[Turn]) -> np.ndarray:
    return np.concatenate([part for turn in turns for part in (np.zeros(len(turn.given), np.float32), turn.generation.logprobs)])


def _versions(turn: Turn, key: str) -> np.ndarray:
    versions = np.full(len(turn), NOT_SAMPLED, dtype=np.int32)
    for span in turn.generation.spans:
        if not span.version.isdecimal():
            raise TrajectoryRejected("bad_version", f"{key}: the engine serves {span.version!r}, which is not a version of this run")
        versions[len(turn.given) + span.start : len(turn.given) + span.end] = int(span.version)
    return versions


def _routes(turns: Sequence[Turn], recording: Recording, key: str) -> Routes | None:
    routing = recording.routing
    if routing is None:
        return None
    parts, tokens = [], 0
    for turn in turns:
        routed, tokens = max(tokens - 1, 0), tokens + len(turn)
        parts.append(routed_experts(turn.generation.routes, routing, tokens=tokens, routed=routed, key=key))
    try:
        return joined(parts, key)
    except ProtocolError as error:  # packed by the engine, and not read until now
        raise TrajectoryRejected("routes_malformed", str(error)) from error


def _top(turns: Sequence[Turn], recording: Recording, key: str) -> np.ndarray | None:
    if not recording.top:
        return None
    parts = [turn.generation.top for turn in turns if turn.generation.top is not None]
    if len(parts) < len(turns):
        raise TrajectoryRejected("no_top", f"{key}: the engine did not send the most probable ids")
    return np.concatenate(parts)


def _masks(turns: Sequence[Turn], recording: Recording, key: str, shared: int) -> EncodedMasks | None:
    if not recording.masks:
        return None
    assert recording.vocabulary is not None
    counts, ids = [np.zeros(sum(map(len, turns[:shared])), np.int32)], [np.zeros(0, np.int32)]
    for turn in turns[shared:]:
        lists = sampling_masks(turn.generation.masks, len(turn.generation.tokens), key)
        counts += np.zeros(len(turn.given), np.int32), lists.counts
        ids.append(lists.ids)
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts)))).astype(np.int32)
    return encode_masks(Masks(offsets, np.concatenate(ids), recording.vocabulary), key)
