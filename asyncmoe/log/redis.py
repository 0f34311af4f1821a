"""Logs in Redis Streams: a record is an entry whose ID is its position. The server refuses an entry unless its ID is above the newest.

So a record that is sent twice counts once, and of two controllers only one can write: opening a log adds an entry at the next multiple of
`_SESSION`, above all IDs that the previous writer can send. The lock only keeps a second controller from displacing a live one: it expires
some seconds after its owner ended. An acknowledged record is durable: the server must sync its file before it answers.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import redis
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, ReadOnlyError, RedisError, ResponseError

from asyncmoe.errors import AsyncmoeError, DataError, StorageError, UserError, gibibytes
from asyncmoe.log.log import LOST, Found, Log, Record, checksum
from asyncmoe.log.room import Room
from asyncmoe.trajectory import Buffer

log = logging.getLogger(__name__)
T = TypeVar("T")
KEY, PASSWORD = "log.redis", "ASYNCMOE_LOG_PASSWORD"
_LEAST = (6, 2)
"""XTRIM MINID needs this version."""
_NEEDS = {
    "redis_mode": "standalone",
    "role": "master",
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "maxmemory-policy": "noeviction",
}
"""With any other settings, a server may lose or evict what it has acknowledged."""
_ENTRY, _OPENED = b"r", b"o"
_MOST_BYTES = (512 << 20) - 4
_SESSION = 1 << 40
_LOCK_S, _PAGE = 6.0, 16
_PATIENCE_S, _ANSWER_S, _PAUSE_S = 60.0, 30.0, 0.5
_BROKEN = (redis.ConnectionError, redis.TimeoutError, ReadOnlyError, BusyLoadingError, OSError)
"""Errors after which a request is resent. They include that of a server that became a replica: the address may soon be the new master's."""
_CRC_BYTES = 4


class RedisServer:
    """A Redis server. Thread-safe.

    Args:
        url: redis://host:port/database, rediss:// (TLS) or unix:///path?db=database, without a password.
        patience_s: seconds for which a request is resent while the server does not answer.
    """

    def __init__(self, url: str, patience_s: float = _PATIENCE_S) -> None:
        self.name, self._patience_s = url.partition("?")[0], patience_s
        limits = {"socket_timeout": _ANSWER_S, "socket_connect_timeout": 5.0, "retry": None}  # `call` retries
        self.client = redis.Redis.from_url(url, protocol=2, password=os.environ.get(PASSWORD), **limits)

    def check(self) -> None:
        """Refuse a server that may lose or evict what it has acknowledged. Raises UserError, StorageError."""
        told = self.call(lambda client: client.info("server") | client.info("replication") | client.config_get(*_NEEDS))
        if tuple(int(part) for part in str(told["redis_version"]).split(".")[:2]) < _LEAST:
            raise UserError(KEY, got=f"Redis {told['redis_version']} at {self.name}", expected="6.2 or later")
        for setting, expected in _NEEDS.items():
            if (got := told.get(setting, "nothing")) != expected:
                hint = "otherwise the server may lose acknowledged records: set this in its redis.conf, or name another server"
                raise UserError(KEY, got=f"{self.name} with {setting} {got}", expected=f"{setting} {expected}", hint=hint)

    def call(self, request: Callable[[Any], T]) -> T:
        """Return the result of a request, which is resent if the server does not answer. Raises UserError, StorageError."""
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return request(self.client)
            except (RedisError, OSError) as error:
                if isinstance(error, AuthenticationError) or not isinstance(error, _BROKEN) or time.monotonic() >= until:
                    raise self.explained(error) from error
                log.warning("log: %s does not answer (%s); trying again", self.name, error)
                time.sleep(_PAUSE_S)

    def room(self, run: str, writers: Sequence[str]) -> Room:
        """Return the room of a run's logs. Blocks. Raises UserError, StorageError."""
        sizes = self.call(lambda client: [int(client.memory_usage(f"asyncmoe:{run}:{writer}") or 0) for writer in writers])
        memory = self.call(lambda client: client.info("memory"))
        total = int(memory.get("maxmemory", 0))
        return Room(max(sizes), total - int(memory["used_memory"]), total)

    def explained(self, error: Exception) -> AsyncmoeError:
        """Convert an error to one for the user."""
        said = " ".join(str(error).split())[:300].rstrip(".")
        if isinstance(error, AuthenticationError | NoPermissionError):
            hint = f"set {PASSWORD}, and name a user as in redis://user@host; docs/guides/log.md lists the permissions it needs"
            return UserError(KEY, got=f"{said} at {self.name}", expected="a user with permission", hint=hint)
        cure = "does not answer: bring it back, or name another one" if isinstance(error, _BROKEN) else "refuses a request: see its log"
        if "maxmemory" in said:
            cure = "is full: raise its maxmemory, or save checkpoints more often (trainer.checkpoint_every), which frees what they cover"
        return StorageError(f"{KEY}: {self.name} ({said}) {cure}; then start the run again: nothing that was acknowledged is lost")


def sealed(key: str, position: int, parts: Sequence[Buffer]) -> bytes:
    """Prefix a record with its checksum, which also covers its key and position."""
    return b"".join([checksum([f"{key} {position}".encode(), *parts]).to_bytes(_CRC_BYTES, "little"), *parts])


def opened(key: str, position: int, data: bytes | None) -> memoryview | None:
    """Return the payload of a `sealed` record, or None if it is damaged."""
    payload = memoryview(data or b"")[_CRC_BYTES:]
    return payload if data is not None and sealed(key, position, [payload]) == data else None


class RedisReader:
    """A `Reader` of logs in Redis. Its methods also raise StorageError if the server does not answer, and UserError if it refuses."""

    def __init__(self, server: RedisServer, run: str) -> None:
        self._server, self._all = server, f"asyncmoe:{run}:"

    def found(self, writer: str) -> Iterator[Found]:
        """See `Reader`."""
        after, key = "-", self._all + writer
        while page := self._page(key, after):
            for name, fields in page:
                after, position = f"({name.decode()}", _position(name)
                if _OPENED not in fields:
                    yield position, position + 1, opened(key, position, fields.get(_ENTRY))

    def read_at(self, position: int, writer: str) -> Buffer:
        """See `Reader`."""
        key = self._all + writer
        found = self._server.call(lambda client: client.xrange(key, f"{position}-0", f"{position}-0"))
        data = opened(key, position, found[0][1].get(_ENTRY)) if found else None
        if data is None:
            got = "a damaged record" if found else "nothing there"
            raise DataError(f"log {self._server.name} {key} position {position}", got=got, expected="a record", hint=LOST)
        return data

    def spans(self, writer: str) -> list[tuple[int, int]]:
        """See `Reader`."""
        key = self._all + writer
        ends = self._server.call(lambda client: [*client.xrange(key, count=1), *client.xrevrange(key, count=1)])
        return [(_position(ends[0][0]), _position(ends[-1][0]) + 1)] if ends else []

    def _page(self, key: str, after: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return self._server.call(lambda client: client.xrange(key, after, count=_PAGE))


def _position(name: bytes) -> int:
    """Return the position that an entry's ID names."""
    return int(name.partition(b"-")[0])


class RedisLog(Log):
    """The log in one stream, asyncmoe:RUN:WRITER. Opening it blocks. Arguments as for `FileLog`.

    Raises:
        UserError: the server is unusable, or another process writes the log.
        StorageError: the server does not answer, or is full.
    """

    def __init__(self, server: RedisServer, run: str, writer: str, max_bytes: int | None = None) -> None:
        self._server, self._call, self._all = server, server.call, f"asyncmoe:{run}:"
        self._key, self._lock = self._all + writer, f"{self._all}{writer}:lock"
        self._mine = f"process {os.getpid()} on {socket.gethostname()} {uuid.uuid4().hex}".encode()
        server.check()
        until = time.monotonic() + _LOCK_S + 1.0
        while not self._call(self._hold):
            if time.monotonic() >= until:  # until then, the lock may be that of a process that ended without releasing it
                raise self._taken()
            time.sleep(0.1)
        begin = self._last = (self._call(self._newest) // _SESSION + 1) * _SESSION
        self._call(lambda client: self._newest(client) < begin and client.xadd(self._key, {_OPENED: self._mine}, id=f"{begin}-0"))
        super().__init__(f"log {server.name} {self._key}", RedisReader(server, run), writer, begin + 1, self._usage(), max_bytes)

    def _write(self, batch: Sequence[Record]) -> None:
        if (most := max(sum(map(len, parts)) for _, parts in batch)) > _MOST_BYTES:
            raise StorageError(f"{KEY}: got a group of {gibibytes(most)}, expected at most 0.50 GiB; keep the log in a folder")

        def send(client: Any) -> None:
            newest = self._newest(client)
            if newest < self._last:
                lost = "the server lost acknowledged records, or somebody deleted them: delete the log's keys, which loses queued groups"
                raise StorageError(f"{self.name}: got records up to {newest}, expected {self._last}; {lost}")
            if newest > batch[-1][0]:
                raise self._taken()
            pipeline = client.pipeline(transaction=False)
            for position, parts in batch:
                if position > newest:  # else it was sent before, and the reply was lost
                    pipeline.xadd(self._key, {_ENTRY: sealed(self._key, position, parts)}, id=f"{position}-0")
            pipeline.execute()

        self._call(send)
        self._last = batch[-1][0]

    def _sync(self) -> None:
        """Do nothing: the server syncs before it answers."""

    def _forget(self, below: int) -> int:
        self._call(lambda client: client.xtrim(self._key, minid=f"{below}-0", approximate=False))
        freed = self.size - self._usage()
        with self._changing:
            self.size -= freed
        return freed

    def _let_go(self) -> None:
        with suppress(RedisError, OSError):
            if self._server.client.get(self._lock) == self._mine:
                self._server.client.delete(self._lock)

    def _taken(self) -> UserError:
        holder = (self._call(lambda client: client.get(self._lock)) or b"one that has ended ?").decode(errors="replace")
        got = f"{self._server.name} {self._all}*, in use by another process ({holder.rpartition(' ')[0]})"
        return UserError("log", got=got, expected="one controller per run, one process per worker", hint="end that process")

    def _hold(self, client: Any) -> bool:
        """Take or renew the lock; return False if another process has it."""
        held = client.get(self._lock)
        return held in (None, self._mine) and bool(client.set(self._lock, self._mine, nx=held is None, px=int(_LOCK_S * 1000)))

    def _newest(self, client: Any) -> int:
        """Return the position of the newest entry that ever existed, or 0 without a stream."""
        try:
            return _position(client.xinfo_stream(self._key)["last-generated-id"])
        except ResponseError:
            return 0

    def _usage(self) -> int:
        return int(self._call(lambda client: client.memory_usage(self._key, samples=0)) or 0)

    def _beat(self) -> None:
        """Renew the lock, and check that the server is still safe. If the server does not answer, writes wait and report it."""
        try:
            if not self._hold(self._server.client):
                raise self._taken()
            self._server.check()
        except (RedisError, OSError, StorageError) as error:
            log.debug("log: %s", error)
