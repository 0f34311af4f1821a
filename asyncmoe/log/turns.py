"""The engines' answers in unfinished episodes: whole turns, and pieces of long ones.

An episode that was interrupted with its run starts again, with the same random draws. A request that repeats a recorded
one gets the recorded answer, each answer once. The answers have their own log, whose records are freed when no unfinished episode needs
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Mapping

import msgspec

from asyncmoe.log.log import Log

log = logging.getLogger(__name__)
SHARE = 4
"""Answers may use 1/`SHARE` of `log.max_bytes`."""


class EpisodeId(msgspec.Struct, frozen=True, array_like=True):
    """Identifies an episode; `attempt` counts restarts of its group or of the episode alone."""

    group: int
    episode: int
    attempt: int

    def key(self, agent: int = 0, branch: int = 0) -> str:
        """Return the name of an agent's trajectory, or of one path of the agent's tree."""
        path = f".b{branch}" if branch else ""
        return f"g{self.group}.e{self.episode}.a{agent}{path}.t{self.attempt}"


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """A turn of an unfinished episode, or a piece of a long turn. `request`: digest of the request."""

    key: EpisodeId
    request: bytes
    answer: bytes


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Answered).decode


def writer(number: int) -> str:
    """Return the name of the log of a process's turns."""
    return f"{number}.turns"


class Turns:
    """The recorded answers of unfinished episodes. For use from one event loop.

    Args:
        kept: their log, which `close` closes. Reading it blocks.
        attempts: attempts of the unfinished groups, by number; answers of other groups or attempts are freed.
    """

    def __init__(self, kept: Log, attempts: Mapping[int, int]) -> None:
        self._log, self._told_full = kept, False
        self._found = defaultdict[tuple[EpisodeId, bytes], deque[int]](deque)
        self._since: dict[int, int] = {}
        for position, data in kept.read():
            one = _decode(data)
            if attempts.get(one.key.group) == one.key.attempt:
                self._found[one.key, one.request].append(position)
                self._since.setdefault(one.key.group, position)
        self._forget()

    async def record(self, key: EpisodeId, request: bytes, answer: bytes) -> None:
        """Record the answer to a request; it is durable soon after.

        Args:
            request: digest of the request.

        Raises:
            StorageError: the log failed.
        """
        data = _encode(Answered(key, request, answer))
        if full := self._log.is_full(len(data)):
            if not self._told_full:
                log.warning("recorded turns take a quarter of log.max_bytes: no more are recorded until groups end")
        else:
            self._since.setdefault(key.group, self._log.append([data]))
        self._told_full = full

    async def recall(self, key: EpisodeId, request: bytes) -> bytes | None:
        """Return the next recorded answer to a request, each only once; None if none is left. Raises DataError if it was damaged."""
        positions = self._found.get((key, request))
        return await asyncio.to_thread(self._read, positions.popleft()) if positions else None

    def over(self, group: int) -> None:
        """Forget the answers of a group that is finished, ended, or starts again."""
        if self._since.pop(group, None) is not None:
            self._forget()

    @property
    def groups(self) -> frozenset[int]:
        """Numbers of the groups that have recorded answers."""
        return frozenset(key.group for key, _ in self._found)

    def close(self) -> None:
        """Make all records durable, and close the log. Blocks."""
        self._log.close()

    def _forget(self) -> None:
        self._log.forget(min(self._since.values(), default=self._log.end))

    def _read(self, position: int) -> bytes:
        return _decode(self._log.read_at(position)).answer
