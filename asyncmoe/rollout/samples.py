"""Keeps some groups as samples: what was asked, given, sampled and scored, also of groups that fail or are dropped.

Of a kept group, the episodes are noted when they begin and summed up when they end. When the group has ended, its record is built and
written: pieces of text between other work of the event loop, the file in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np

from asyncmoe.config import Config
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rollout.engines.types import VersionSpan
from asyncmoe.rollout.episodes.environment import Agent, Episode
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.pieces import Pieces
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.telemetry.samples import records
from asyncmoe.telemetry.samples.choice import Choice, choice_of, ends, kept
from asyncmoe.telemetry.samples.file import SampleFile
from asyncmoe.telemetry.samples.records import Fate, Role, SampledMember, Stale, Stretch, ToolCall
from asyncmoe.trajectory import Trajectory

_SHOWN = 2000
"""Characters kept of a failure."""
_SMALL = 8192
"""Tokens of a group that are encoded and written within a few milliseconds, which is not worth a thread."""


@dataclass(frozen=True)
class _Turn:
    """A turn without its routes and masks, which are large."""

    given: tuple[int, ...]
    tokens: np.ndarray
    logprobs: np.ndarray
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True)
class _Part:
    """One path of an agent in an episode. `at`: (agent, branch); `given`: tokens since its last response."""

    name: str
    at: tuple[int, int]
    turns: tuple[_Turn, ...]
    given: tuple[int, ...]
    finish: str
    calls: tuple[ToolCall, ...]
    why: str

    def own(self, forked: int) -> tuple[_Turn, ...]:
        """Return the turns after the first `forked` tokens."""
        ends = accumulate(len(turn.given) + len(turn.tokens) for turn in self.turns)
        return tuple(turn for turn, end in zip(self.turns, ends, strict=True) if end > forked)

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for turn in self.turns for token in (*turn.given, *turn.tokens.tolist())] + list(self.given)


@dataclass(frozen=True)
class _Ended:
    """What an episode left: a trajectory of each path that spoke, by (agent, branch), or why there is none."""

    parts: tuple[_Part, ...]
    results: dict[tuple[int, int], _Result]
    failure: str


@dataclass(frozen=True)
class _Result:
    """The parts of a trajectory that its turns do not have."""

    reward: float
    rewards: np.ndarray | None
    teacher: np.ndarray | None
    seconds: dict[str, float]
    digest: int
    parent: int
    forked: int


class Samples:
    """Keeps groups of one run.

    Args:
        choice: the groups to keep.
        max_tokens: as telemetry.samples.max_tokens.
    """

    def __init__(self, file: SampleFile, choice: Choice, pieces: Pieces, max_tokens: int) -> None:
        self._file, self._choice, self._pieces, self._most = file, choice, pieces, max_tokens
        self._episodes: dict[EpisodeId, Episode | _Ended] = {}
        self._writing = asyncio.Lock()

    def opened(self, episode: Episode) -> None:
        """Note that an episode begins."""
        if self._file.is_open and self._choice.takes(episode.place.group):
            self._episodes[episode.place] = episode

    def ended(self, place: EpisodeId, outcome: Sequence[Trajectory] | TrajectoryRejected) -> None:
        """Note how an episode ended."""
        if not self._choice.takes(place.group) or not isinstance(made := self._episodes.get(place), Episode):
            return
        if isinstance(outcome, TrajectoryRejected):
            self._episodes[place] = _Ended(_parts(made), {}, str(outcome)[:_SHOWN])
        else:
            results = {(t.agent, t.branch): _result(t) for t in outcome}
            # A path that is the beginning of another is part of that one.
            parts = tuple(part for part in _parts(made) if part.at in results or not part.turns)
            self._episodes[place] = _Ended(parts, results, "")

    async def write(
        self, group: int, attempt: int, places: Iterable[EpisodeId], prompt: Prompt, fate: Fate, version: int, reason: str, detail: str = ""
    ) -> None:
        """Write a group that has ended, if it is one to keep.

        Args:
            places: the episodes that were started for it.
            version: weight version that the engines serve.
            reason, detail: why it was dropped or rejected.
        """
        if not self._choice.takes(group):
            return
        noted = [(place, self._episodes.pop(place)) for place in places if place in self._episodes]
        if not noted:
            return
        ended = [(place, made if isinstance(made, _Ended) else _Ended(_parts(made), {}, "cancelled")) for place, made in noted]
        shared = next((part.turns[0].given for _, one in ended for part in one.parts if part.turns), prompt.tokens)
        now = time.time()
        async with self._writing:  # the memory that one group takes, not that of all that end at once
            members = [await self._member(place, part, one, shared) for place, one in ended for part in one.parts]
            record = records.SampledGroup(
                time=now,
                group=group,
                attempt=attempt,
                fate=fate,
                reason=reason,
                detail=_clean(detail[:_SHOWN]),
                version=version,
                question=_clean(prompt.text),
                answer=_clean(prompt.answer),
                prompt=await self._stretch(shared),
                members=members,
            )
            if sum(len(member.rest.tokens) for member in members) < _SMALL:
                self._file.write(record)
            else:
                await asyncio.to_thread(self._file.write, record)

    def stale(self, groups: Sequence[Group], requeued: bool, version: int) -> None:
        """Write that groups were too old for a step that begins at `version`."""
        for group in groups:
            if self._choice.takes(group.number):
                self._file.write(
                    Stale(
                        time=time.time(),
                        group=group.number,
                        attempt=group.attempt,
                        fate="requeued" if requeued else "dropped",
                        reason="stale",
                        version=version,
                        oldest=group.oldest_version,
                    )
                )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    async def _member(self, place: EpisodeId, part: _Part, ended: _Ended, shared: tuple[int, ...]) -> SampledMember:
        result = ended.results.get(part.at)
        forked = 0 if result is None else result.forked
        roles, own = _roles(part, forked), part.own(forked)
        begins = bool(part.turns) and part.turns[0].given == shared
        sampled = np.concatenate([turn.logprobs for turn in own]) if own else np.zeros(0, np.float32)
        head, tail = kept(len(sampled), self._most)
        rewards = None if result is None else result.rewards
        teacher = None if result is None else result.teacher
        return SampledMember(
            key=place.key(*part.at),
            episode=place.episode,
            agent=part.at[0],
            branch=part.at[1],
            parent=0 if result is None else result.parent,
            forked=forked,
            attempt=place.attempt,
            name=_clean(part.name),
            shared=begins,
            rest=await self._stretch(part.tokens[len(shared) if begins else 0 :]),
            roles=roles,
            logprobs=records.rounded(ends(sampled, head, tail)),
            versions=_versions(own),
            finish=part.finish,
            reward=None if result is None else result.reward,
            rewards=[] if rewards is None else [(int(i), float(rewards[i])) for i in np.flatnonzero(~np.isnan(rewards))],
            teacher=[] if teacher is None else records.rounded(ends(teacher[_sampled(roles)], head, tail)),
            calls=part.calls,
            seconds={} if result is None else {name: round(seconds, 4) for name, seconds in result.seconds.items()},
            digest=None if result is None else result.digest,
            why=_clean(part.why),
            failure=_clean(ended.failure),
        )

    async def _stretch(self, tokens: Sequence[int]) -> Stretch:
        head, tail = kept(len(tokens), self._most)
        left_out = len(tokens) - head - tail
        some = [*tokens[:head], *tokens[len(tokens) - tail :]] if left_out else list(tokens)
        return Stretch(tokens=some, pieces=await self._pieces.of(some), left_out=left_out, after=head if left_out else 0)


def samples_of(config: Config, pieces: Pieces, step: int) -> Samples | None:
    """Return the samples of a run that has taken `step` optimizer steps; None if none are wanted."""
    section = config.telemetry.samples
    if not section.groups:
        return None
    file = SampleFile(config.run.dir, records.ROLLOUT_SAMPLES, section.max_bytes, step, kept=config.journal.enabled)
    return Samples(file, choice_of(config), pieces, section.max_tokens)


def _parts(episode: Episode) -> tuple[_Part, ...]:
    return tuple(_part(agent) for agent in list(episode.agents.values()))


def _part(agent: Agent) -> _Part:
    turns = tuple(_Turn(turn.given, turn.generation.tokens, turn.generation.logprobs, turn.generation.spans) for turn in agent.turns)
    finish = agent.turns[-1].generation.finish if agent.turns else ""
    return _Part(agent.name, (agent.number, agent.branch), turns, agent.unanswered, finish, tuple(agent.calls), agent.why)


def _result(t: Trajectory) -> _Result:
    return _Result(t.reward, t.rewards, t.teacher, t.seconds, records.digest_of(t.tokens, t.logprobs), t.parent, t.forked)


def _roles(part: _Part, forked: int) -> list[tuple[Role, int]]:
    """Return the (role, size) of each stretch that is not empty; adjacent responses (an interrupted one was continued) are one. Responses
    within the first `forked` tokens, which another path trains, are context: observations."""
    sizes: list[tuple[Role, int]] = []
    shared = len(part.turns) - len(part.own(forked))
    for i, turn in enumerate(part.turns):
        sizes += [("observation" if i else "prompt", len(turn.given)), ("observation" if i < shared else "response", len(turn.tokens))]
    sizes.append(("observation" if part.turns else "prompt", len(part.given)))
    some = [(role, size) for role, size in sizes if size]
    return [(role, sum(size for _, size in same)) for role, same in groupby(some, key=lambda one: one[0])]


def _sampled(roles: Sequence[tuple[Role, int]]) -> np.ndarray:
    """Return bool[T]: whether the token was sampled."""
    return np.repeat([role == "response" for role, _ in roles], [size for _, size in roles])


def _versions(turns: Sequence[_Turn]) -> list[tuple[int, int]]:
    spans = [(int(s.version) if s.version.isdecimal() else -1, s.end - s.start) for turn in turns for s in turn.spans]
    return [(version, sum(size for _, size in same)) for version, same in groupby(spans, key=lambda one: one[0])]


def _clean(text: str) -> str:
    """Return text that can be written: a lone surrogate, which a user's program may give, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
