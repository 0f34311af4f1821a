"""The states of groups and leases as a stream: each transaction is one entry, kept in the order of its number.

The tables themselves are in this process's memory (SQLite). A journal that is opened applies the newest snapshot, then the entries after
it. A checkpoint that covers rows has them deleted, a snapshot of the rest written and the entries in it trimmed, in one step: no entry is
trimmed before.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence

from asyncmoe.errors import AsyncmoeError, DataError, InvariantBroken, StorageError, gibibytes
from asyncmoe.journal import rows
from asyncmoe.journal.in_redis import entries, scripts, settings
from asyncmoe.journal.in_redis.hold import Hold
from asyncmoe.journal.in_redis.scripts import Keys
from asyncmoe.journal.in_redis.server import RedisServer
from asyncmoe.journal.rows import Change

log = logging.getLogger(__name__)
_PAGE = 256
"""Entries read at once."""
_MOST_BYTES = 256 << 20
"""Of an entry, or of a snapshot."""


class RedisStates:
    """The stream of one journal. A `StatesStore`.

    Args:
        identity: what the journal belongs to, in the user's terms: {"run.seed": "3"}.
        begun: is called once the tables are read, with whether they are new.
    """

    def __init__(self, server: RedisServer, hold: Hold, keys: Keys, identity: Mapping[str, str], begun: Callable[[bool], None]) -> None:
        self.name, self._journal = server.name, keys.journal(server.name)
        self._server, self._hold, self._keys, self._identity, self._begun = server, hold, keys, identity, begun
        self._newest = self._covered = 0

    def connect(self) -> sqlite3.Connection:
        """Take the hold and read the tables; see `StatesStore`."""
        self._hold.take()
        connection = sqlite3.connect(":memory:", isolation_level=None)
        try:
            new = not self._read(connection)
            if new:
                self._fill(connection)
            elif rows.is_blank(connection, self._identity):
                connection.close()
                connection = sqlite3.connect(":memory:", isolation_level=None)
                self._clear()
                self._fill(connection)
            rows.check(connection, self._identity, self._journal, settings.KEY, self._afresh)
        except BaseException:
            connection.close()
            raise
        self._begun(new)
        return connection

    def keep(self, changes: Sequence[Change]) -> None:
        """Add the entry of a transaction.

        Raises:
            UserError: another controller has taken over.
            StorageError: the server failed, is full, or has lost entries.
        """
        number = self._newest + 1
        data = entries.pack(changes, self._entry(number))
        if len(data) > _MOST_BYTES:
            raise InvariantBroken(f"journal: {gibibytes(len(data))} of changes in one transaction")
        answer = self._hold.step(scripts.KEEP, (self._keys.entries,), number, data)
        if answer != "done":
            lost = "entries that it had acknowledged: a replica that lagged has taken its place, or it was restored from a copy"
            raise StorageError(f"journal: {self.name} is {answer}, expected {self._newest}; it has lost {lost}")
        self._newest = number

    def compact(self, connection: sqlite3.Connection) -> None:
        """Write a snapshot, and trim the entries in it. Raises as `keep`."""
        if self._covered == self._newest:
            return
        data = entries.snapshot(connection, self._snapshot(self._newest))
        if len(data) > _MOST_BYTES:
            log.warning("journal: a snapshot of %s is not kept; entries stay. Save checkpoints more often", gibibytes(len(data)))
            return
        keys = (self._keys.snapshot, self._keys.entries)
        self._hold.step(scripts.COMPACT, keys, self._newest, data, self._newest + 1)
        self._covered = self._newest

    def explained(self, error: Exception) -> AsyncmoeError:
        """Return the error for the user."""
        return self._server.explained(error)

    def close(self) -> None:
        """Let another controller take over."""
        self._hold.release()

    def _read(self, connection: sqlite3.Connection) -> bool:
        """Fill the tables with what was kept, and return whether there was anything.

        Raises:
            DataError: it is damaged, or entries are missing.
        """
        state = self._server.call(lambda redis: redis.hmget(self._keys.state, "entry", "snapshot"))
        newest, covered = (int(number or 0) for number in state)
        if not newest:
            return False
        for statement in rows.SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute("BEGIN")
        if covered:
            entries.restore(connection, self._bounded(), self._snapshot(covered))
        number = covered
        for number, data in self._entries(covered):
            for change in entries.unpack(data, self._entry(number)):
                change.apply(connection)
        if number != newest:
            raise DataError(self._journal, got=f"entries up to {number}", expected=f"the entries up to {newest}", hint=self._afresh)
        connection.execute("COMMIT")
        self._newest, self._covered = newest, covered
        return True

    def _entries(self, after: int) -> Iterator[tuple[int, bytes | None]]:
        number = after
        while True:
            page = self._page(number + 1)
            for found, fields in page:
                if found != f"{number + 1}-0".encode():
                    raise DataError(self._journal, got=f"entry {found.decode()}", expected=f"entry {number + 1}-0", hint=self._afresh)
                number += 1
                yield number, fields.get(b"entry")
            if not page:
                return

    def _page(self, first: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return self._server.call(lambda redis: redis.xrange(self._keys.entries, f"{first}-0", "+", _PAGE))

    def _bounded(self) -> bytes | None:
        """Return the snapshot's bytes."""
        size = self._server.call(lambda redis: redis.strlen(self._keys.snapshot))
        if size > _MOST_BYTES + entries.CRC.size:
            raise DataError(f"{self._journal}: the snapshot", got=gibibytes(size), expected=f"at most {gibibytes(_MOST_BYTES)}")
        found: bytes | None = self._server.call(lambda redis: redis.get(self._keys.snapshot))
        return found

    def _fill(self, connection: sqlite3.Connection) -> None:
        rows.make_tables(connection, self._identity)
        facts = rows.facts(connection)
        self.keep([rows.fact(name, value) for name, value in facts.items()])

    def _clear(self) -> None:
        """Delete all entries and payloads."""
        others = (self._keys.entries, self._keys.snapshot, self._keys.groups, self._keys.turns)
        self._hold.step(scripts.CLEAR, others)
        self._newest = self._covered = 0

    @property
    def _afresh(self) -> str:
        return f"delete its keys {self._keys.every}: what was queued or under way is then sampled again"

    def _entry(self, number: int) -> str:
        return f"{self._keys.entries} {number}"

    def _snapshot(self, number: int) -> str:
        return f"{self._keys.snapshot} {number}"
