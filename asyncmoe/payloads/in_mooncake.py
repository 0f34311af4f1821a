"""Groups in Mooncake's store: objects with the bytes of each, and one with its index, which is put last and has all the others' names.

Every object has a hard pin: a full store refuses it, and drops none. The store counts nothing for us and lists no names, so that a lost
process's groups are found by the beginning of their names.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence

from asyncmoe.config.queue import QueueSection
from asyncmoe.errors import DataError, StorageError
from asyncmoe.payloads import mooncake_layout as layout
from asyncmoe.payloads import packed
from asyncmoe.payloads.mooncake_client import FULL, MooncakeClient
from asyncmoe.payloads.mooncake_layout import GroupIndex, PlannedRead
from asyncmoe.payloads.packed import Asked
from asyncmoe.payloads.store import Found
from asyncmoe.trajectory import Buffer

log = logging.getLogger(__name__)
_BATCH_BYTES = 16 << 20
"""Of one read, unless a single trajectory is larger."""
_LEFT_S = 900
"""Seconds, besides those for which `put` waits, after which a process of which the controller has no group was lost."""
_REMOVED = 32
"""Groups that are removed by one regular expression."""
_LONGEST_PAUSE_S = 1.0


class MooncakeGroups:
    """A `GroupStore`.

    Args:
        full_s: seconds for which a group waits while there is no room.
    """

    def __init__(self, client: MooncakeClient, full_s: float) -> None:
        self._client, self.full_s = client, full_s
        self._left_s = full_s + _LEFT_S
        self._heard: dict[str, float] = {}
        self._ended = threading.Event()

    @classmethod
    def open(cls, section: QueueSection, *, patient: bool = True, writes: bool = False) -> MooncakeGroups:
        """Connect to the store of a run. Blocks.

        Args:
            patient: wait for a master that cannot be reached.
            writes: give the store `segment_bytes` of memory.

        Raises:
            ConfigError: the package cannot be used, the master cannot be reached, or the store has no memory.
            StorageError: it did not answer in time.
        """
        gives = section.mooncake.segment_bytes
        client = MooncakeClient.open(section.mooncake, gives if writes else 0, patient=patient)
        try:
            if not (patient or gives):
                client.probe()
        except BaseException:
            client.close()
            raise
        return cls(client, section.lease_timeout_s)

    def begin(self, run: str) -> str:
        """See `GroupStore`. Raises ConfigError: the store has no memory."""
        if left := self._client.remove_matching(f"^asyncmoe:{re.escape(run)}:"):
            log.info("payloads: %d objects that an earlier controller left in Mooncake are deleted", left)
        self._client.probe()
        return f"asyncmoe:{run}:{uuid.uuid4().hex[:12]}."

    def put(self, stored: str, frames: Mapping[str, Sequence[Buffer]], until: float | None = None) -> None:
        """See `GroupStore`."""
        parts, index = layout.joined(stored, frames)
        until = time.monotonic() + self.full_s if until is None else until
        began, pause_s = time.monotonic(), 0.01
        while (code := self._written(stored, parts, index)) != 0:
            # What there is of a group that waits would be in the way of others, which wait for the same room.
            self._remove(stored, index)
            if code == FULL:
                pause_s = self._pause(until, pause_s)
                began = time.monotonic()
                continue
            # Such as a transfer to a lost process, whose memory the master still has on its list.
            if time.monotonic() - began > self._client.patience_s:
                raise StorageError(f"payloads: Mooncake at {self._client.master} does not keep {stored} (its error {code}); see its log")
            self._ended.wait(_LONGEST_PAUSE_S)

    def get(self, asked: Sequence[Asked]) -> Found:
        """See `GroupStore`."""
        names = list(dict.fromkeys(one.stored for one in asked))
        indexes = dict(zip(names, self._indexes(names), strict=True))
        plans = [_planned(each, indexes[each.stored]) for each in asked]
        return [one for batch in packed.batches(plans, _nbytes, _BATCH_BYTES) for one in self._read(batch)]

    def delete(self, stored: Sequence[str]) -> None:
        """See `GroupStore`."""
        names = list(dict.fromkeys(stored))
        lost = list[str]()
        for name, index in zip(names, self._indexes(names), strict=True):
            if isinstance(index, GroupIndex):
                self._remove(name, index)
            else:
                lost.append(name)
        for first in range(0, len(lost), _REMOVED):
            # The index was in memory that is gone; other objects of the group may lie elsewhere.
            self._client.remove_matching(f"^({'|'.join(map(re.escape, lost[first : first + _REMOVED]))}):")

    def sweep(self, prefix: str, live: Collection[str]) -> int:
        """See `GroupStore`; deletes all that a process has put once the controller has had no group of it for long."""
        self._client.look()
        now = time.monotonic()
        self._heard |= {one.rpartition(".")[0]: now for one in live if one.startswith(prefix)}
        lost = [writer for writer, heard in self._heard.items() if now - heard > self._left_s]
        for writer in lost:
            del self._heard[writer]
        return sum(self._client.remove_matching(f"^{re.escape(writer)}\\.") for writer in lost)

    def clear(self, prefix: str) -> None:
        """See `GroupStore`."""
        self._client.remove_matching(f"^{re.escape(prefix)}")

    def end(self) -> None:
        """See `GroupStore`."""
        self._ended.set()

    def close(self) -> None:
        """See `GroupStore`."""
        self.end()
        self._client.close()

    def _written(self, stored: str, parts: Sequence[Buffer], index: GroupIndex) -> int:
        """Put the objects of a group, and its index; return 0 if all of them are there, else an error number of Mooncake."""
        keys = layout.object_keys(stored, index.nbytes)
        objects = zip(keys, layout.cut(parts), strict=True)
        for key, data in (*objects, (layout.index_key(stored), [memoryview(layout.sealed(stored, index))])):
            if self._ended.is_set():
                self._remove(stored, index)
                raise StorageError("payloads: the run ends, and puts nothing more")
            if (code := self._client.put(key, data)) != 0:
                return code
        return 0 if self._client.all_there([*keys, layout.index_key(stored)]) else -1

    def _pause(self, until: float, pause_s: float) -> float:
        if time.monotonic() >= until:
            raise StorageError(
                f"payloads: Mooncake at {self._client.master} is full; nothing was freed for {self.full_s:g} s (queue.lease_timeout_s); "
                "give it more memory (queue.mooncake.segment_bytes), or lower queue.capacity"
            )
        if pause_s == _LONGEST_PAUSE_S:
            log.warning("payloads: Mooncake at %s takes nothing more; a group waits for the trainer", self._client.master)
        self._ended.wait(pause_s)
        return min(2 * pause_s, _LONGEST_PAUSE_S)

    def _remove(self, stored: str, index: GroupIndex) -> None:
        """Remove a group; its index last, so that nothing lies there that nobody can find."""
        self._client.remove([*layout.object_keys(stored, index.nbytes), layout.index_key(stored)])

    def _indexes(self, stored: Sequence[str]) -> list[GroupIndex | DataError]:
        found = self._client.small([layout.index_key(name) for name in stored])
        return [_index(name, one) for name, one in zip(stored, found, strict=True)]

    def _read(self, batch: Sequence[PlannedRead | DataError]) -> Iterator[list[Buffer] | DataError]:
        plans = [one for one in batch if isinstance(one, PlannedRead)]
        wanted, targets, at = list[layout.StoredRange](), dict[int, int](), 0
        owners = list[int]()
        for plan in plans:
            targets[id(plan)] = at
            some = list(layout.ranges(plan, at))
            wanted, owners, at = wanted + some, owners + [id(plan)] * len(some), at + plan.nbytes
        buffer, codes = self._client.read(wanted, at)
        failed = {owner: code for owner, one, code in zip(owners, wanted, codes, strict=True) if code != one.nbytes}
        data = buffer.data.toreadonly()
        for one in batch:
            yield one if isinstance(one, DataError) else _unpacked(one, data[targets[id(one)] :], failed.get(id(one)))


def _index(stored: str, found: bytes | str) -> GroupIndex | DataError:
    try:
        if isinstance(found, str):
            raise DataError(f"payload {stored}", got=found, expected="what was put there")
        return layout.opened(stored, found)
    except DataError as error:
        return error


def _planned(asked: Asked, index: GroupIndex | DataError) -> PlannedRead | DataError:
    try:
        return index if isinstance(index, DataError) else layout.planned(asked, index)
    except DataError as error:
        return error


def _unpacked(plan: PlannedRead, data: memoryview, code: int | None) -> list[Buffer] | DataError:
    pieces, at = dict[str, Buffer | None](), 0
    for name, (_, length) in plan.places.items():
        pieces[name], at = data[at : at + length], at + length
    try:
        if code is not None:
            got = "nothing" if code == -704 else f"Mooncake's error {code}" if code < 0 else f"{code} bytes"
            raise DataError(plan.asked.name, got=got, expected="what was put there")
        return packed.unpacked(plan.asked, plan.head, pieces)
    except DataError as error:
        return error


def _nbytes(planned: PlannedRead | DataError) -> int:
    return 0 if isinstance(planned, DataError) else planned.nbytes
