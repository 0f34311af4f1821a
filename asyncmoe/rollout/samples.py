"""Keep some groups as samples: what was asked, given, sampled and scored, including groups that fail or are dropped.

The worker notes the episodes of a kept group when they begin and summarises them when they end. When the group has ended, its record is
built and written: its text is split by token between other work of the event loop, and the file is written in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from asyncmoe.config import Config
from asyncmoe.log.turns import EpisodeId
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rollout.pieces import Pieces
from asyncmoe.rollout.sampled_episodes import SHOWN, SampledEpisode, SampledPath, cleaned
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.telemetry.samples import records
from asyncmoe.telemetry.samples.choice import Choice, choice_of, kept
from asyncmoe.telemetry.samples.file import SampleFile
from asyncmoe.telemetry.samples.records import Fate, SampledMember, Stale, Stretch

T = TypeVar("T")


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
        """Take a worker's records of an episode that has ended."""
        if self._file.is_open:
            self._ended[place] = left

    async def write(self, places: Sequence[EpisodeId], prompt: Prompt, fate: Fate, version: int, reason: str, detail: str = "") -> None:
        """Write a group that has ended, if it is kept.

        Args:
            places: the episodes that were started for it.
            version: weight version that the engines serve.
            reason, detail: why it was dropped or rejected.
        """
        found = [self._ended.pop(place, None) for place in places]
        if not (paths := [path for left in found for path in left or ()]):
            return
        shared = next((path.prompt for path in paths if path.prompt), prompt.tokens)
        now = time.time()
        async with self._writing:  # limits memory to one group's when many end at once
            members = [await self._member(path, shared) for path in paths]
            record = records.SampledGroup(
                time=now,
                group=places[0].group,
                attempt=places[0].attempt,
                fate=fate,
                reason=reason,
                detail=cleaned(detail[:SHOWN]),
                version=version,
                question=cleaned(prompt.text),
                answer=cleaned(prompt.answer),
                prompt=await self._stretch(shared),
                members=members,
            )
            await asyncio.to_thread(self._file.write, record)

    def stale(self, groups: Sequence[Group], requeued: bool, version: int) -> None:
        """Record that groups were too old for a step that begins at `version`."""
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

    async def _member(self, path: SampledPath, shared: tuple[int, ...]) -> SampledMember:
        """Return the record of a path in a group with the prompt `shared`: with its tokens' texts, and of bounded size."""
        member, begins = path.member, bool(path.prompt) and path.prompt == shared
        head, tail = kept(len(member.logprobs), self._most)
        return msgspec.structs.replace(
            member,
            shared=begins,
            rest=await self._stretch([*(() if begins else path.prompt), *member.rest.tokens]),
            logprobs=_ends(member.logprobs, head, tail),
            teacher=_ends(member.teacher, head, tail) if member.teacher else [],
        )

    async def _stretch(self, tokens: Sequence[int]) -> Stretch:
        head, tail = kept(len(tokens), self._most)
        left_out = len(tokens) - head - tail
        some = _ends(tokens, head, tail)
        return Stretch(tokens=some, pieces=await self._pieces.of(some), left_out=left_out, after=head if left_out else 0)


def samples_of(config: Config, pieces: Pieces, step: int) -> Samples | None:
    """Return the samples of a run that has taken `step` optimizer steps; None if none are wanted."""
    if not config.telemetry.samples.groups:
        return None
    file = SampleFile(config.run.dir, records.ROLLOUT_SAMPLES, records.MOST_BYTES, step)
    return Samples(file, choice_of(config), pieces, records.MOST_TOKENS)


def _ends(values: Sequence[T], head: int, tail: int) -> list[T]:
    """Return the first `head` and last `tail` values."""
    return [*values[:head], *values[len(values) - tail :]]
