"""What the engines answered to episodes that are under way: whole turns, and the pieces of long ones.

An episode that was interrupted with its run begins again, with the same random draws. As long as it asks what it asked before, it gets the
recorded answers, in their order. Answers have segments of their own, which are deleted when no episode under way needs them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from asyncmoe.errors import DataError, StorageError, gibibytes
from asyncmoe.journal.payload_store import PayloadStore
from asyncmoe.journal.segment_format import HEADER_BYTES, Place, footprint
from asyncmoe.journal.segments import Segments

log = logging.getLogger(__name__)
_SETTLE_S = 1.0
"""Seconds after which an answer is on disk at the latest, if the disk keeps up. Nobody waits for it."""
_SLACK = 2
"""The segments may hold so many times what answers may take: a bound that is reached here only ends the recording."""
_LEAST_SEGMENTS = 8
"""Segments that the bound has room for: only whole ones are deleted, and not the newest."""


class EpisodeKey(msgspec.Struct, frozen=True, array_like=True):
    """Names an episode, as `EpisodeId`."""

    group: int
    episode: int
    attempt: int


class _Header(msgspec.Struct, frozen=True, array_like=True):
    key: EpisodeKey
    request: bytes
    """Digest of the request."""
    answer: bytes


class Turns:
    """The recorded answers of episodes under way. For one event loop."""

    def __init__(self, segments: PayloadStore, most: int) -> None:
        self._segments, self._most = segments, most
        self._found: dict[EpisodeKey, dict[bytes, deque[Place]]] = {}
        self._groups: defaultdict[int, set[int]] = defaultdict(set)  # segment -> groups with an answer in it
        self._of: defaultdict[int, set[int]] = defaultdict(set)  # group -> its segments
        self._newest: Place | None = None
        self._settling: asyncio.Task[None] | None = None
        self._full = False

    @classmethod
    def open(
        cls, folder: Path, identity: str, attempts: Mapping[int, int], *, writer: int = 0, segment_bytes: int, max_bytes: int
    ) -> Turns:
        """Open or make the store of a folder, and find the answers of groups under way. Blocks, for as long as it takes to read them.

        Args:
            attempts: of the groups under way, by number.
            writer: number of the process, of several that share the folder.
            max_bytes: bound on the answers; those that exceed it are not recorded.

        Raises:
            DataError, UserError, StorageError: as `Segments.open`.
        """
        with ExitStack() as held:
            size = min(segment_bytes, max(max_bytes // _LEAST_SEGMENTS, 1))
            segments = Segments.open(folder, identity, writer=writer, segment_bytes=size, max_bytes=_SLACK * max_bytes)
            held.callback(segments.close)
            made = cls.of(segments, str(folder), attempts, max_bytes)
            held.pop_all()
            return made

    @classmethod
    def of(cls, segments: PayloadStore, name: str, attempts: Mapping[int, int], max_bytes: int) -> Turns:
        """Find the answers of groups under way in a store, which may hold a little more than `max_bytes`. Blocks. See `open`.

        Args:
            name: of the store, for messages.
        """
        made = cls(segments, max_bytes)
        for place in segments.recorded():
            try:
                one = msgspec.msgpack.decode(segments.read(place), type=_Header)
            except (msgspec.MsgspecError, DataError) as error:
                log.warning("%s: an answer at %s cannot be read, so its turn is sampled again: %s", name, place, error)
                continue
            if attempts.get(one.key.group) == one.key.attempt:
                made._found.setdefault(one.key, {}).setdefault(one.request, deque()).append(place)
                made._note(one.key.group, place.segment)
        segments.retain(made._needed(), segments.newest)
        return made

    async def record(self, key: EpisodeKey, request: bytes, answer: bytes) -> None:
        """Record the answer to a request; it is on disk soon after.

        Args:
            request: its digest.

        Raises:
            StorageError: the disk failed.
        """
        payload = msgspec.msgpack.encode(_Header(key, request, answer))
        if self._too_large(len(payload)):
            return
        await self._segments.room(len(payload))
        if self._too_large(len(payload)):
            return
        self._newest = self._segments.append([payload])
        self._note(key.group, self._newest.segment)
        self._settle_soon()

    async def recall(self, key: EpisodeKey, request: bytes) -> bytes | None:
        """Return the next recorded answer to a request, once; None if there is no more.

        Raises:
            DataError: it was damaged since `open`.
        """
        places = self._found.get(key, {}).get(request)
        if not places:
            return None
        payload = await asyncio.to_thread(self._segments.read, places.popleft())
        return msgspec.msgpack.decode(payload, type=_Header).answer

    def over(self, group: int) -> None:
        """Forget the answers of a group that is finished, ended, or starts again."""
        for segment in self._of.pop(group, ()):
            self._groups[segment].discard(group)
            if not self._groups[segment]:
                self._settle_soon()
        for key in [key for key in self._found if key.group == group]:
            del self._found[key]

    @property
    def groups(self) -> frozenset[int]:
        """Numbers of the groups of which answers were found."""
        return frozenset(key.group for key in self._found)

    @property
    def size(self) -> int:
        """Bytes of the answers' files."""
        return self._segments.size

    def close(self) -> None:
        """Write what was recorded, and close all files. Blocks."""
        if self._settling is not None:
            self._settling.cancel()
        self._segments.close()

    def _too_large(self, nbytes: int) -> bool:
        full = self._segments.size + footprint(nbytes) + HEADER_BYTES > self._most
        if full and not self._full:
            bound = gibibytes(self._most)
            log.warning("turns under way take %s, a quarter of journal.max_bytes: further ones are not recorded until groups end", bound)
        self._full = full
        return full

    def _note(self, group: int, segment: int) -> None:
        self._groups[segment].add(group)
        self._of[group].add(segment)

    def _settle_soon(self) -> None:
        if self._settling is None or self._settling.done():
            self._settling = asyncio.get_running_loop().create_task(self._settle())

    async def _settle(self) -> None:
        """Bring what was recorded to the disk, and delete what nobody needs."""
        await asyncio.sleep(_SETTLE_S)
        try:
            if self._newest is not None:
                await self._segments.durable(self._newest)
            await asyncio.to_thread(self._segments.retain, self._needed(), self._segments.newest)
        except StorageError as error:
            log.error("%s", error)  # the next `record` raises it

    def _needed(self) -> set[int]:
        """Segments that a group under way needs."""
        for segment in [segment for segment, groups in self._groups.items() if not groups]:
            del self._groups[segment]
        return set(self._groups)
