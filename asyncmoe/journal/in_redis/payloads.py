"""Payloads in a hash: of finished groups, and of answers to episodes under way.

Each payload is a segment of its own. Its number has the number of the session above 32 bits, so no two controllers ever write to one place.
It lies in fields of at most `PART_BYTES`, each with a checksum, whose names say the payload's length: one that a kill cut off is known by
its missing fields. Only deleting takes the hold: what a controller that has been replaced still adds is named by no row.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from asyncmoe.errors import AsyncmoeError, DataError, InvariantBroken, StorageError, WaitTimeout, gibibytes
from asyncmoe.journal.in_redis import entries, scripts
from asyncmoe.journal.in_redis.hold import Hold
from asyncmoe.journal.in_redis.server import RedisServer
from asyncmoe.journal.payload_writer import MOST_UNWRITTEN
from asyncmoe.journal.segment_format import Place
from asyncmoe.journal.segments import check_bound
from asyncmoe.trajectory import Buffer

PART_BYTES = 16 << 20
_BATCH_BYTES = 8 << 20
_SESSION = 1 << 32
_OVERHEAD = 128
"""What a field takes besides its value, roughly."""
_FIELDS_A_STEP = 1000
_CLOSE_S = 60.0
_FIELD = re.compile(r"(0|[1-9][0-9]{0,18})\.(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,18})", re.ASCII)


@dataclass
class _Unwritten:
    place: Place
    parts: Sequence[memoryview]
    done: Future[None]


class RedisPayloads:
    """The payloads of one hash. A `PayloadStore`."""

    def __init__(self, server: RedisServer, hold: Hold, key: str, lengths: Mapping[int, int], max_bytes: int) -> None:
        """See `open`.

        Args:
            lengths: of the payloads found, by segment.
        """
        self._server, self._hold, self._key, self._max_bytes = server, hold, key, max_bytes
        self._found = sorted(lengths.items())
        self._lengths = dict(lengths)
        self._size = sum(_footprint(length) for length in lengths.values())
        self._next = hold.session * _SESSION
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[_Unwritten] = deque()
        self._writing: dict[int, Future[None]] = {}
        self._unwritten = 0
        self._closing = False
        self._failure: AsyncmoeError | None = None
        self._thread = threading.Thread(target=self._serve, name="journal payloads", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, server: RedisServer, hold: Hold, key: str, max_bytes: int) -> RedisPayloads:
        """Open the payloads of a key, and delete those that are not whole. Blocks.

        Args:
            hold: which was taken.
            max_bytes: bound on all payloads together.

        Raises:
            UserError: another controller has taken over.
            StorageError: the server failed.
        """
        parts: dict[tuple[int, int], set[int]] = defaultdict(set)
        odd = []
        for field in server.call(lambda redis: redis.hkeys(key)):
            if found := _FIELD.fullmatch(field.decode(errors="replace")):
                parts[int(found[1]), int(found[3])].add(int(found[2]))
            else:
                odd.append(field)
        whole = {segment: length for (segment, length), have in parts.items() if have == set(range(_count(length)))}
        torn = [_field(*one, part) for one, have in parts.items() if whole.get(one[0]) != one[1] for part in have]
        store = cls(server, hold, key, whole, max_bytes)
        try:
            store._delete([*odd, *torn])
        except BaseException:
            store.close()
            raise
        return store

    async def room(self, nbytes: int) -> None:
        """See `PayloadStore`."""
        while True:
            with self._lock:
                check_bound(self._size, _footprint(nbytes), self._max_bytes)
                if self._fits(nbytes):
                    return
                oldest = next(iter(self._writing.values()))
            await _over(oldest)

    def append(self, parts: Sequence[Buffer]) -> Place:
        """See `PayloadStore`. A larger payload than may wait, waits alone."""
        views = [view for part in parts if (view := memoryview(part)).nbytes]
        views = [view.cast("B") for view in views]
        length = sum(len(view) for view in views)
        with self._lock:
            if not self._fits(length):
                got = f"{gibibytes(length)} more than {self._server.name} has taken"
                raise StorageError(f"journal: got {got}, expected at most {gibibytes(MOST_UNWRITTEN)} not yet written; wait for `room`")
            check_bound(self._size, _footprint(length), self._max_bytes)
            place, done = Place(0, self._next, 0, length), Future[None]()
            done.set_running_or_notify_cancel()  # whoever stops waiting for it cancels nothing
            self._next += 1
            self._lengths[place.segment] = length
            self._size += _footprint(length)
            self._unwritten += _footprint(length)
            self._writing[place.segment] = done
            self._queue.append(_Unwritten(place, views, done))
            self._work.notify()
        return place

    async def durable(self, place: Place) -> None:
        """See `PayloadStore`. Raises DataError if nothing was appended there."""
        with self._lock:
            writing, known = self._writing.get(place.segment), self._lengths.get(place.segment) == place.length
        if writing is not None:
            await _over(writing)
        elif not known:
            raise DataError("journal payload", got=f"{place}, where nothing was appended", expected="the place of a payload")
        elif self._failure is not None and place.segment >= self._hold.session * _SESSION:
            raise self._failure

    def read(self, place: Place) -> bytearray:
        """See `PayloadStore`."""
        data = bytearray()
        for part in range(_count(place.length)):
            size = min(PART_BYTES, place.length - part * PART_BYTES)
            data += self._part(_field(place.segment, place.length, part), size + entries.CRC.size)
        return data

    def recorded(self) -> Iterator[Place]:
        """See `PayloadStore`."""
        for segment, length in self._found:
            yield Place(0, segment, 0, length)

    def retain(self, live: Iterable[int], below: int | None = None) -> int:
        """See `PayloadStore`."""
        kept = set(live)
        with self._lock:
            end = self._next if below is None else below
            dead = [one for one in self._lengths.items() if one[0] not in kept and one[0] < end and one[0] not in self._writing]
        self._delete([_field(*one, part) for one in dead for part in range(_count(one[1]))])
        with self._lock:
            freed = sum(_footprint(self._lengths.pop(segment)) for segment, _ in dead if segment in self._lengths)
            self._size -= freed
        return freed

    def retain_left(self, live: Mapping[int, Collection[int]], writers: int) -> int:
        """See `PayloadStore`: nobody but the controller writes here."""
        return 0

    @property
    def size(self) -> int:
        """See `PayloadStore`."""
        with self._lock:
            return self._size

    @property
    def newest(self) -> int:
        """See `PayloadStore`."""
        with self._lock:
            return max(self._next - 1, self._hold.session * _SESSION)

    def close(self) -> None:
        """See `PayloadStore`. A second call does nothing."""
        with self._lock:
            self._closing = True
            self._work.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise WaitTimeout(self._server.name, "payloads to be written", _CLOSE_S)

    def _fits(self, nbytes: int) -> bool:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise InvariantBroken("a payload was appended to a closed journal")
        return not self._unwritten or self._unwritten + _footprint(nbytes) <= MOST_UNWRITTEN

    def _part(self, name: str, size: int) -> memoryview:
        """Return a field's bytes, without their checksum, once the server says that it has `size`."""
        key = self._key
        if (found := self._server.call(lambda redis: redis.hstrlen(key, name))) != size:
            got = f"{found} bytes" if found else "nothing"
            raise DataError(f"journal {self._server.name}: {key} {name}", got=got, expected=f"a payload's {size} bytes")
        return entries.opened(self._server.call(lambda redis: redis.hget(key, name)), f"{key} {name}")

    def _delete(self, fields: Sequence[str | bytes]) -> None:
        for begin in range(0, len(fields), _FIELDS_A_STEP):
            self._hold.step(scripts.DELETE, (self._key,), *fields[begin : begin + _FIELDS_A_STEP])

    # ------------------------------------------------------------ the thread

    def _serve(self) -> None:
        while batch := self._next_batch():
            try:
                self._hold.check()
                self._write(batch)
            except Exception as error:  # noqa: BLE001  raised by every later call
                self._fail(self._server.explained(error))
                return
            with self._lock:
                for one in batch:
                    del self._writing[one.place.segment]
                    self._unwritten -= _footprint(one.place.length)
            for one in batch:
                one.done.set_result(None)

    def _next_batch(self) -> list[_Unwritten]:
        """Wait for payloads, and return some; none at the end."""
        with self._lock:
            self._work.wait_for(lambda: self._queue or self._closing)
            batch: list[_Unwritten] = []
            nbytes = 0
            while self._queue and (not batch or nbytes + self._queue[0].place.length <= _BATCH_BYTES):
                batch.append(self._queue.popleft())
                nbytes += batch[-1].place.length
            return batch

    def _write(self, batch: Sequence[_Unwritten]) -> None:
        """Write payloads, with one answer from the server for all that fit into one request."""
        fields: list[tuple[str, bytes]] = []
        nbytes = 0
        for one in batch:
            for part, pieces in enumerate(_cut(one.parts)):
                name = _field(one.place.segment, one.place.length, part)
                fields.append((name, entries.seal(pieces, f"{self._key} {name}")))
                nbytes += len(fields[-1][1])
                if nbytes >= PART_BYTES:
                    self._send(fields)
                    fields, nbytes = [], 0
        if fields:
            self._send(fields)

    def _send(self, fields: Sequence[tuple[str, bytes]]) -> None:
        def request(redis: Any) -> None:
            pipeline = redis.pipeline(transaction=False)
            for name, data in fields:
                pipeline.hset(self._key, name, data)
            pipeline.execute()

        self._server.call(request)

    def _fail(self, error: AsyncmoeError) -> None:
        with self._lock:
            self._failure = error
            waiting = list(self._writing.values())
            self._queue.clear()
            self._writing.clear()
        for each in waiting:
            each.set_exception(error)


async def _over(writing: Future[None]) -> None:
    await asyncio.shield(asyncio.wrap_future(writing))


def _cut(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the pieces of each field; one empty list if there are no bytes."""
    pieces: list[memoryview] = []
    room = PART_BYTES
    for whole in parts:
        view = whole
        while len(view) > room:
            yield [*pieces, view[:room]] if room else pieces
            view, pieces, room = view[room:], [], PART_BYTES
        pieces.append(view)
        room -= len(view)
    yield pieces


def _count(length: int) -> int:
    return max(-(-length // PART_BYTES), 1)


def _field(segment: int, length: int, part: int) -> str:
    return f"{segment}.{part}.{length}"


def _footprint(length: int) -> int:
    return length + _count(length) * _OVERHEAD
