"""Keeps some groups as samples: what was asked, given, sampled and scored, also of groups that fail or are dropped.

Of a kept group, the worker notes the episodes when they begin and sums them up when they end. When the group has ended, its record is built
and written: pieces of text between other work of the event loop, the file in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from asyncmoe.config import Config
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.rollout.pieces import Pieces
from asyncmoe.rollout.sampled_episodes import SHOWN, SampledEpisode, SampledPart, SampledTurn, cleaned
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.telemetry.samples import records
from asyncmoe.telemetry.samples.choice import Choice, choice_of, ends, kept
from asyncmoe.telemetry.samples.file import SampleFile
from asyncmoe.telemetry.samples.records import Fate, Role, SampledMember, Stale, Stretch

_SMALL = 8192
"""Tokens of a group that are encoded and written within a few milliseconds, which is not worth a thread."""


class Samples:
    """Keeps groups of one run.

    Args:
        choice: the groups to keep.
        max_tokens: as `records.MOST_TOKENS`.
    """

    def __init__(self, file: SampleFile, choice: Choice, pieces: Pieces, max_tokens: int) -> None:
        self._file, self._choice, self._pieces, self._most = file, choice, pieces, max_tokens
        self._ended: dict[EpisodeId, SampledEpisode] = {}
        self._writing = asyncio.Lock()

    def noted(self, place: EpisodeId, left: SampledEpisode) -> None:
        """Take what a worker noted of an episode that has ended."""
        if self._file.is_open and self._choice.takes(place.group):
            self._ended[place] = left

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
        found = [(place, self._ended.pop(place, None)) for place in places]
        if not (ended := [(place, left) for place, left in found if left is not None]):
            return
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
                detail=cleaned(detail[:SHOWN]),
                version=version,
                question=cleaned(prompt.text),
                answer=cleaned(prompt.answer),
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

    async def _member(self, place: EpisodeId, part: SampledPart, ended: SampledEpisode, shared: tuple[int, ...]) -> SampledMember:
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
            name=cleaned(part.name),
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
            why=cleaned(part.why),
            failure=cleaned(ended.failure),
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
    file = SampleFile(config.run.dir, records.ROLLOUT_SAMPLES, records.MOST_BYTES, step)
    return Samples(file, choice_of(config), pieces, records.MOST_TOKENS)


def _roles(part: SampledPart, forked: int) -> list[tuple[Role, int]]:
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


def _versions(turns: Sequence[SampledTurn]) -> list[tuple[int, int]]:
    spans = [(int(s.version) if s.version.isdecimal() else -1, s.end - s.start) for turn in turns for s in turn.spans]
    return [(version, sum(size for _, size in same)) for version, same in groupby(spans, key=lambda one: one[0])]
