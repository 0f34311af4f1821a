"""Groups in a Redis server: a hash for each, and a stream of their names.

A writer enters a group in the stream, writes its hash, and confirms that all of it is there. An answer that is lost has the request sent
again (at least once), so a stream may name a group twice, and a group that a killed process was writing: whoever reads the stream knows
groups by their names. Nothing here needs the server's disk: what it loses is read from the journal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from asyncmoe.config.queue import QueueSection
from asyncmoe.errors import StorageError, gibibytes
from asyncmoe.journal.in_redis import settings
from asyncmoe.journal.in_redis.server import RedisServer, is_full, password_of
from asyncmoe.journal.in_redis.settings import ServerUse
from asyncmoe.payloads import packed, redis_reading, redis_scripts
from asyncmoe.payloads.packed import Asked
from asyncmoe.payloads.redis_reading import BATCH_BYTES
from asyncmoe.payloads.redis_scripts import field
from asyncmoe.payloads.store import Found
from asyncmoe.trajectory import Buffer

log = logging.getLogger(__name__)
KEY = "queue.redis"
_DROPS = ("noeviction", "volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl")
_USE = ServerUse(
    "payloads",
    KEY,
    "queue.payloads=workers needs none",
    {"maxmemory-policy": (_DROPS, "otherwise a full server deletes what is not yet trained")},
    "raise its maxmemory, or lower queue.capacity",
    "start the run again: what was finished is in the journal",
    "docs/guides/payloads.md",
)
_PAGE = 1000
_OVERHEAD = 128
"""What a field takes besides its value, roughly."""
_LEFT_S = 900
"""Seconds, besides those for which `put` waits, after which a group of which the controller does not know was left by a lost process."""
_TRIES = 3
"""How often a group is written whose server loses it meanwhile."""
_LONGEST_PAUSE_S = 1.0


class RedisGroups:
    """A `GroupStore`.

    Args:
        max_bytes: bound on all groups of a run.
        full_s: seconds for which a group waits while there is no room.
    """

    def __init__(self, server: RedisServer, max_bytes: int, full_s: float) -> None:
        self._server, self._max_bytes, self.full_s = server, max_bytes, full_s
        self._left_s = full_s + _LEFT_S
        self._ended = threading.Event()

    @classmethod
    def open(cls, section: QueueSection, *, patient: bool = True) -> RedisGroups:
        """Connect to the server of a run. Blocks.

        Args:
            patient: wait for a server that cannot be reached.

        Raises:
            ConfigError: the variable with the password is not set.
            UserError: the server cannot be reached, or may drop what it holds.
            StorageError: it did not answer in time.
        """
        assert section.redis is not None
        password = password_of(section.redis_password_variable, KEY)
        server = RedisServer(section.redis, password, section.redis_patience_s, _USE)
        try:
            server.check(patient=patient)
        except BaseException:
            server.close()
            raise
        return cls(server, section.payload_bytes, section.lease_timeout_s)

    def begin(self, run: str) -> str:
        """See `GroupStore`."""
        name = redis_scripts.begin_of(run)
        # The server may have been started again, without the number of the controller whose groups came after that.
        highest = max((redis_scripts.session_of(stored) for _, stored, _ in self._entries(name)), default=0)
        session = self._note(name, max(highest, 0), 1)
        prefix = redis_scripts.prefix_of(name, session)
        if left := self._drop_entries(prefix, lambda stored, age_s: redis_scripts.session_of(stored) < session):
            log.info("payloads: %d groups that an earlier controller left in %s are deleted", left, self._server.name)
        return prefix

    def put(self, stored: str, frames: Mapping[str, Sequence[Buffer]], until: float | None = None) -> None:
        """See `GroupStore`."""
        fields: dict[str, Buffer] = {}
        for key, one in frames.items():
            fields |= {field(key, piece): data for piece, data in packed.packed(stored, key, one).items()}
        nbytes = sum(memoryview(data).nbytes + len(name) + _OVERHEAD for name, data in fields.items())
        until = time.monotonic() + self.full_s if until is None else until
        for _ in range(_TRIES):
            self._reserve(stored, nbytes, until)
            self._write(stored, fields, until)
            if self._whole(stored, len(fields)):
                return
        raise StorageError(f"payloads: {self._server.name} has lost {stored} {_TRIES} times while it was written; see its log")

    def get(self, asked: Sequence[Asked]) -> Found:
        """See `GroupStore`."""
        return redis_reading.get(self._server, asked)

    def delete(self, stored: Sequence[str]) -> None:
        """See `GroupStore`."""
        for first in range(0, len(stored), _PAGE):
            self._drop(stored[first : first + _PAGE])

    def sweep(self, prefix: str, live: Collection[str]) -> int:
        """See `GroupStore`."""
        settings.check_config(self._server.call(lambda redis: settings.read(redis, _USE)), self._server.name, _USE)
        session, known = redis_scripts.session_of(prefix), set(live)
        self._note(redis_scripts.run_of(prefix), session, 0)
        return self._drop_entries(
            prefix, lambda stored, age_s: age_s > self._left_s and stored not in known and redis_scripts.session_of(stored) <= session
        )

    def clear(self, prefix: str) -> None:
        """See `GroupStore`."""
        session = redis_scripts.session_of(prefix)
        self._drop_entries(prefix, lambda stored, age_s: redis_scripts.session_of(stored) <= session)
        self._server.step(redis_scripts.END, self._keys(prefix)[:2], session)

    def end(self) -> None:
        """See `GroupStore`."""
        self._ended.set()

    def close(self) -> None:
        """See `GroupStore`."""
        self.end()
        self._server.close()

    # ------------------------------------------------------------ putting

    def _reserve(self, stored: str, nbytes: int, until: float) -> None:
        """Enter a group in the stream, once there is room for it. Raises StorageError if there is none until then."""
        if nbytes > self._max_bytes:
            got = f"a group of {gibibytes(nbytes)}"
            raise StorageError(f"payloads: got {got}, expected at most queue.payload_bytes = {gibibytes(self._max_bytes)}; raise it")
        keys, pause_s = self._keys(stored), 0.01

        def full() -> str:
            answer = self._server.step(redis_scripts.RESERVE, keys, stored, nbytes, self._max_bytes).decode()
            if answer == "done":
                return ""
            bound = f"queue.payload_bytes = {gibibytes(self._max_bytes)}"
            return f"payloads: {self._server.name} holds {gibibytes(int(float(answer)))} of the run's groups, and {bound}"

        while said := self._unless_full(full):
            pause_s = self._pause(said, until, pause_s)

    def _write(self, stored: str, fields: Mapping[str, Buffer], until: float) -> None:
        """Write the pieces of a group that is entered. Waits and raises as `_reserve`."""
        for batch in _cut(fields):

            def send(batch: Mapping[str, Buffer] = batch) -> str:
                self._server.call(lambda redis: redis.hset(stored, mapping=batch))
                return ""

            pause_s = 0.01
            while said := self._unless_full(send):
                pause_s = self._pause(said, until, pause_s)

    def _whole(self, stored: str, count: int) -> bool:
        """Return whether all fields of a group are there; delete it if not: its server or somebody has lost some of it meanwhile."""

        def look(redis: Any) -> tuple[bool, int]:
            pipeline = redis.pipeline(transaction=True)
            pipeline.hexists(stored, redis_scripts.ENTRY).hlen(stored)
            entered, fields = pipeline.execute()
            return bool(entered), int(fields)

        if self._server.call(look) == (True, count + 1):
            return True
        self._drop([stored])
        return False

    def _unless_full(self, request: Callable[[], str]) -> str:
        """Send a request; return why it must wait, or nothing."""
        if self._ended.is_set():
            raise StorageError("payloads: the run ends, and puts nothing more")
        try:
            return request()
        except StorageError as error:
            if not is_full(error.__cause__):
                raise
            return str(error)

    def _pause(self, said: str, until: float, pause_s: float) -> float:
        if time.monotonic() >= until:
            raise StorageError(
                f"{said}; nothing was freed for {self.full_s:g} s (queue.lease_timeout_s); raise it, or lower queue.capacity"
            )
        if pause_s == _LONGEST_PAUSE_S:
            log.warning("%s; a group waits for the trainer", said)
        self._ended.wait(pause_s)
        return min(2 * pause_s, _LONGEST_PAUSE_S)

    # ------------------------------------------------------------ the stream

    def _drop_entries(self, prefix: str, dead: Callable[[str, float], bool]) -> int:
        """Drop the groups in a run's stream of which `dead(name, age in seconds)` is true, and second entries of others."""
        seconds, micros = self._server.call(lambda redis: redis.time())
        now_ms, seen, dropped = seconds * 1000 + micros // 1000, set[str](), 0
        for entry, name, nbytes in self._entries(redis_scripts.run_of(prefix)):
            gone = dead(name, (now_ms - int(entry.partition(b"-")[0])) / 1000)
            if gone or name in seen:
                if gone and redis_scripts.session_of(name) >= 0:
                    self._drop([name])
                self._server.step(redis_scripts.FORGET, self._keys(prefix)[:2], entry, nbytes)
                dropped += 1
            seen.add(name)
        return dropped

    def _entries(self, run: str) -> Iterator[tuple[bytes, str, bytes]]:
        """Yield id, name and bytes of each entry in a run's stream."""
        after = "-"
        while page := self._page(run, after):
            after = f"({page[-1][0].decode()}"
            for entry, told in page:
                yield entry, told.get(b"name", b"").decode(errors="replace"), told.get(b"bytes", b"0")

    def _note(self, run: str, session: int, more: int) -> int:
        """Note the number of a run's newest controller, at least `session`, plus `more`; return it."""
        keys = redis_scripts.totals(run), redis_scripts.stream(run)
        return int(self._server.step(redis_scripts.SESSION, keys, session, more))

    def _page(self, run: str, after: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        page: list[tuple[bytes, dict[bytes, bytes]]]
        page = self._server.call(lambda redis: redis.xrange(redis_scripts.stream(run), after, "+", _PAGE))
        return page

    def _drop(self, stored: Sequence[str]) -> None:
        def request(redis: Any) -> None:
            pipeline = redis.pipeline(transaction=False)
            for name in stored:
                pipeline.eval(redis_scripts.DROP, 3, *self._keys(name))
            pipeline.execute()

        self._server.call(request)

    def _keys(self, stored: str) -> tuple[str, str, str]:
        run = redis_scripts.run_of(stored)
        return redis_scripts.totals(run), redis_scripts.stream(run), stored


def _cut(fields: Mapping[str, Buffer]) -> Iterator[dict[str, Buffer]]:
    """Yield fields of `BATCH_BYTES` together, or one."""
    batch: dict[str, Buffer] = {}
    nbytes = 0
    for name, data in fields.items():
        size = memoryview(data).nbytes
        if batch and nbytes + size > BATCH_BYTES:
            yield batch
            batch, nbytes = {}, 0
        batch[name] = memoryview(data).cast("B") if size else b""
        nbytes += size
    yield batch
