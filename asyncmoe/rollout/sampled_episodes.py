"""Records of an episode's paths for readers of samples, without routes, masks and the texts of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import msgspec
import numpy as np

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.log.turns import EpisodeId
from asyncmoe.rollout.episodes.environment import Agent, Episode
from asyncmoe.rollout.episodes.trajectory_builder import Turn
from asyncmoe.rpc.codec import parsed
from asyncmoe.telemetry.samples import records
from asyncmoe.telemetry.samples.choice import Choice
from asyncmoe.telemetry.samples.records import Role, SampledMember, Stretch
from asyncmoe.trajectory import Trajectory

SHOWN = 2000
"""Maximum characters kept of a failure."""


class SampledPath(msgspec.Struct, frozen=True):
    """One path of an agent in an episode.

    Attributes:
        prompt: tokens before its first response; empty without a response.
        member: its record; `rest` has all other tokens, and no texts.
    """

    prompt: tuple[int, ...]
    member: SampledMember


SampledEpisode = tuple[SampledPath, ...]
"""Records of an episode: each path that responded, and the agents that did not."""


class EpisodeNotes:
    """Records the episodes of kept groups from beginning to end.

    Args:
        choice: the groups to keep.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._episodes: dict[EpisodeId, Episode] = {}

    def opened(self, episode: Episode) -> None:
        """Note that an episode begins."""
        if self._choice.takes(episode.place.group):
            self._episodes[episode.place] = episode

    def ended(self, place: EpisodeId, outcome: Sequence[Trajectory] | TrajectoryRejected | None) -> SampledEpisode | None:
        """Return the records of an episode that ended with `outcome` (None: cancelled), or None if it is not kept."""
        if (made := self._episodes.pop(place, None)) is None:
            return None
        agents = list(made.agents.values())
        if outcome is None or isinstance(outcome, TrajectoryRejected):
            failure = "cancelled" if outcome is None else cleaned(str(outcome)[:SHOWN])
            return tuple(_path(place, agent, None, failure) for agent in agents)
        results = {(t.agent, t.branch): t for t in outcome}
        # A path that is a prefix of another is part of that one.
        kept = [agent for agent in agents if (agent.number, agent.branch) in results or not agent.turns]
        return tuple(_path(place, agent, results.get((agent.number, agent.branch)), "") for agent in kept)


def cleaned(text: str) -> str:
    """Return text that can be encoded: a lone surrogate, which a user's code may produce, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


to_bytes = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SampledEpisode).decode


def from_bytes(sent: bytes) -> SampledEpisode:
    """Decode the records of another process. Raises ProtocolError."""
    return parsed(lambda: _decode(sent), "sampled episode")


def _path(place: EpisodeId, agent: Agent, made: Trajectory | None, failure: str) -> SampledPath:
    turns, forked = agent.turns, 0 if made is None else made.forked
    own = [turn for turn, end in zip(turns, accumulate(map(len, turns)), strict=True) if end > forked]
    prompt = turns[0].given if turns else ()
    logprobs = np.concatenate([turn.generation.logprobs for turn in own]) if own else np.zeros(0, np.float32)
    roles = _roles(turns, len(turns) - len(own), len(agent.tokens) - len(agent.answered))
    member = SampledMember(
        key=place.key(agent.number, agent.branch),
        episode=place.episode,
        agent=agent.number,
        branch=agent.branch,
        attempt=place.attempt,
        name=cleaned(str(agent.name)[:SHOWN]),
        rest=Stretch(tokens=list(agent.tokens[len(prompt) :])),
        roles=roles,
        logprobs=records.rounded(logprobs),
        versions=_versions(own),
        finish=turns[-1].generation.finish if turns else "",
        calls=tuple(agent.calls),
        why=cleaned(str(agent.why)[:SHOWN]),  # a user's code may set both this and the name
        failure=failure,
    )
    return SampledPath(prompt, member if made is None else _with_result(member, made))


def _with_result(member: SampledMember, made: Trajectory) -> SampledMember:
    steps = [] if made.rewards is None else [(int(i), float(made.rewards[i])) for i in np.flatnonzero(~np.isnan(made.rewards))]
    sampled = np.repeat([role == "response" for role, _ in member.roles], [size for _, size in member.roles])
    return msgspec.structs.replace(
        member,
        parent=made.parent,
        forked=made.forked,
        reward=made.reward,
        metrics=made.metrics,
        rewards=steps,
        teacher=[] if made.teacher is None else records.rounded(made.teacher[sampled[: len(made.teacher)]]),
        seconds={name: round(seconds, 4) for name, seconds in made.seconds.items()},
        digest=records.digest_of(made.tokens, made.logprobs),
    )


def _roles(turns: Sequence[Turn], shared: int, unanswered: int) -> list[tuple[Role, int]]:
    """Return the (role, size) of each non-empty stretch; adjacent responses (after an interruption) are merged. The first `shared`
    responses, which another path trains, are context: observations."""
    sizes: list[tuple[Role, int]] = []
    for i, turn in enumerate(turns):
        given, said = len(turn.given), len(turn.generation.tokens)
        sizes += [("observation" if i else "prompt", given), ("observation" if i < shared else "response", said)]
    sizes.append(("observation" if turns else "prompt", unanswered))
    some = [(role, size) for role, size in sizes if size]
    return [(role, sum(size for _, size in same)) for role, same in groupby(some, key=lambda one: one[0])]


def _versions(turns: Sequence[Turn]) -> list[tuple[int, int]]:
    spans = [(int(s.version) if s.version.isdecimal() else -1, s.end - s.start) for turn in turns for s in turn.generation.spans]
    return [(version, sum(size for _, size in same)) for version, same in groupby(spans, key=lambda one: one[0])]
