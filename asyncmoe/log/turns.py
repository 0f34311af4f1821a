"""What the engines answered to episodes that are under way: whole turns, and the pieces of long ones.

An episode that was interrupted with its run begins again, with the same random draws. As long as it asks what it asked before, it gets the
recorded answers, in their order. They have a log of their own, which lets go of what no episode under way needs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping

import msgspec

from asyncmoe.errors import gibibytes
from asyncmoe.log.log import Log

log = logging.getLogger(__name__)
SHARE = 4
"""Answers may take this fraction of the bound on payloads."""


class EpisodeKey(msgspec.Struct, frozen=True, array_like=True):
    """Names an episode, as `EpisodeId`."""

    group: int
    episode: int
    attempt: int


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """A turn of an episode under way, or a piece of a long one. `request`: digest of what was asked."""

    key: EpisodeKey
    request: bytes
    answer: bytes


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Answered).decode


def writer(number: int) -> str:
    """Return the name of the log of a process's turns."""
    return f"{number}.turns"


class Turns:
    """The recorded answers of episodes under way. For one event loop.

    Args:
        kept: their log, which this closes. Reading it blocks.
        attempts: of the groups under way, by number; answers of others are let go of.
    """

    def __init__(self, kept: Log, attempts: Mapping[int, int]) -> None:
        self._log, self._told_full = kept, False
        self._found: dict[EpisodeKey, dict[bytes, deque[int]]] = {}
        self._since: dict[int, int] = {}
        self._forgetting: asyncio.Future[int] | None = None
        for position, data in kept.read():
            try:
                one = _decode(data)
            except ValueError as error:
                log.warning("%s: position %d is passed over, so its turn is sampled again: %s", kept.name, position, error)
                continue
            if attempts.get(one.key.group) == one.key.attempt:
                self._found.setdefault(one.key, {}).setdefault(one.request, deque()).append(position)
                self._since.setdefault(one.key.group, position)
        kept.forget(self._needed)

    async def record(self, key: EpisodeKey, request: bytes, answer: bytes) -> None:
        """Record the answer to a request; it is durable soon after.

        Args:
            request: its digest.

        Raises:
            StorageError: the log failed, or could not let go of what is over.
        """
        if self._failed:
            raise self._failed
        data = _encode(Answered(key, request, answer))
        if not self._log.is_full(len(data)):
            await self._log.room(len(data))
        if (full := self._log.is_full(len(data))) and not self._told_full:
            bound = f"{gibibytes(self._log.size)}, a quarter of log.max_bytes"
            log.warning("turns under way take %s: further ones are not recorded until groups end", bound)
        self._told_full = full
        if not full:
            self._since.setdefault(key.group, self._log.append([data]))

    async def recall(self, key: EpisodeKey, request: bytes) -> bytes | None:
        """Return the next recorded answer to a request, once; None if there is no more. Raises DataError: it was damaged meanwhile."""
        positions = self._found.get(key, {}).get(request)
        if not positions:
            return None
        return _decode(await asyncio.to_thread(self._log.read_at, positions.popleft())).answer

    def over(self, group: int) -> None:
        """Forget the answers of a group that is finished, ended, or starts again."""
        going = self._forgetting is not None and not self._forgetting.done()
        if self._since.pop(group, None) is not None and not (going or self._failed):
            self._forgetting = asyncio.get_running_loop().run_in_executor(None, self._log.forget, self._needed)
        for key in [key for key in self._found if key.group == group]:
            del self._found[key]

    @property
    def groups(self) -> frozenset[int]:
        """Numbers of the groups of which answers were found."""
        return frozenset(key.group for key in self._found)

    @property
    def _failed(self) -> BaseException | None:
        """Why the newest attempt to let go of answers failed."""
        return self._forgetting.exception() if self._forgetting is not None and self._forgetting.done() else None

    @property
    def _needed(self) -> int:
        return min(self._since.values(), default=self._log.end)

    def close(self) -> None:
        """Make durable what was recorded, and close the log. Blocks."""
        self._log.close()
