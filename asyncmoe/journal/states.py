"""The states of groups and leases in SQLite: write-ahead log, an fsync at every commit (synchronous=FULL), one thread for the connection.

Changes are made in the order in which they were given, many in one transaction: after any stop the file holds the first n of them. No other
process can open the file meanwhile (locking_mode=EXCLUSIVE, which needs no shared memory).
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncmoe import storage
from asyncmoe.errors import AsyncmoeError, DataError, InvariantBroken, StorageError, UserError, WaitTimeout
from asyncmoe.journal import rows, wal
from asyncmoe.journal.rows import Change
from asyncmoe.queue.accounts import Accounts

log = logging.getLogger(__name__)
T = TypeVar("T")
FILE = "states.sqlite"
_LAZY_S = 0.1
"""Seconds that changes nobody waits for may wait for others, so that they share an fsync."""
_DISK_S = 300.0
"""Seconds after which a disk counts as hung."""
_ERRNOS = {"SQLITE_FULL": errno.ENOSPC, "SQLITE_READONLY": errno.EROFS, "SQLITE_IOERR": errno.EIO, "SQLITE_CANTOPEN": errno.EACCES}
_LOCKLESS = ("SQLITE_IOERR_LOCK", "SQLITE_IOERR_RDLOCK", "SQLITE_IOERR_UNLOCK", "SQLITE_IOERR_CHECKRESERVEDLOCK", "SQLITE_PROTOCOL")
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_SCHEMA", "SQLITE_ERROR")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "glusterfs", "fuse.")


@dataclass
class _Entry:
    """What the thread does in one go: changes, then perhaps a question, whose answer also says that the changes are on disk.

    `ledger`: the queue's after the changes; only the last one of a transaction is written.
    """

    ticket: int
    changes: Sequence[Change]
    ledger: Accounts | None = None
    urgent: bool = False
    ask: Callable[[sqlite3.Connection], Any] | None = None
    done: Future[Any] | None = None


class States:
    """The file of one journal. `write` and `durable` are for one event loop.

    Attributes:
        tickets: number of `write` calls; a change is on disk when the ticket of its call is.
    """

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self._path, self._identity = path, identity
        self.tickets = self._committed = 0
        self._failure: AsyncmoeError | None = None
        self._inbox: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, name="journal states", daemon=True)

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, str]) -> States:
        """Open the file in a folder, which is made (mode 0700); an absent file is made (mode 0600).

        Args:
            identity: what a journal belongs to, in the user's terms: {"run.seed": "3"}.

        Raises:
            DataError: it belongs to something else, has another format, or is damaged.
            UserError: another process has it open.
            StorageError: it cannot be written.
        """
        path = folder / FILE
        with storage.writing("the journal", folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        if (kind := network_file_system(folder)) is not None:
            log.warning("the journal is on a network file system (%s at %s), which may be slow; journal.folder names another", kind, folder)
        states = cls(path, identity)
        states._thread.start()
        states._waited(states._opened)
        return states

    def write(self, changes: Sequence[Change], ledger: Accounts | None = None, *, urgent: bool = False) -> int:
        """Hand over changes, which are made together or not at all. Never waits.

        Args:
            ledger: the queue's after the changes.
            urgent: do not wait for others to share the fsync.

        Returns:
            their ticket, for `durable`.

        Raises:
            StorageError: the disk failed before.
        """
        if self._failure is not None:
            raise self._failure
        self.tickets += 1
        self._inbox.put(_Entry(self.tickets, changes, ledger, urgent))
        return self.tickets

    async def durable(self, ticket: int) -> None:
        """Wait until the changes of a ticket are on disk.

        Raises:
            StorageError: the disk failed.
            WaitTimeout: the disk did not answer.
        """
        if self._failure is not None:
            raise self._failure
        if ticket > self._committed:
            await self.ask(lambda connection: None)

    async def ask(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """Return what a function finds in the file once all changes so far are on disk; it runs in the file's thread.

        Raises as `durable`.
        """
        try:
            async with asyncio.timeout(_DISK_S):
                return await asyncio.wrap_future(self._ask(question))
        except TimeoutError:
            raise WaitTimeout("the disk of the journal", str(self._path), _DISK_S) from None

    def read(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """As `ask`, but block."""
        return self._waited(self._ask(question))

    def close(self) -> None:
        """Write what was handed over, and close the file. A second call does nothing."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(_DISK_S)

    def _waited(self, future: Future[T]) -> T:
        try:
            return future.result(_DISK_S)
        except FutureTimeout:
            raise WaitTimeout("the disk of the journal", str(self._path), _DISK_S) from None

    def _ask(self, question: Callable[[sqlite3.Connection], T]) -> Future[T]:
        done: Future[T] = Future()
        if self._failure is not None:
            done.set_exception(self._failure)
        else:
            self._inbox.put(_Entry(self.tickets, (), urgent=True, ask=question, done=done))
        return done

    # ------------------------------------------------------------ the thread

    def _serve(self) -> None:
        try:
            connection = self._connect()
        except Exception as error:  # noqa: BLE001  raised by `open`
            self._opened.set_exception(self._explained(error))
            return
        self._opened.set_result(None)
        try:
            while entries := self._take():
                self._commit(connection, entries)
        finally:
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=0.0, isolation_level=None)
        try:
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                connection.execute(f"PRAGMA {pragma}").fetchall()
            connection.execute("BEGIN IMMEDIATE")  # from here on nobody else writes
            _check_log(self._path)
            if not connection.execute("SELECT name FROM sqlite_master").fetchall():
                _fill(connection, self._identity)
            connection.execute("COMMIT")
            # The log begins anew, so that what an earlier start has left behind its end is not taken for damage.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise DataError(
                    str(self._path), got=" ".join(found.split())[:200], expected="a whole journal", hint=_afresh(self._path.parent)
                )
            _check(rows.facts(connection), self._identity, self._path.parent)
        except BaseException:
            connection.close()
            raise
        return connection

    def _take(self) -> list[_Entry]:
        """Return entries to commit together; none at the end."""
        entries: list[_Entry] = []
        until = None
        while True:
            try:
                entry = self._inbox.get(timeout=None if until is None else max(until - time.monotonic(), 0.0))
            except queue.Empty:
                return entries
            if entry is None:
                self._inbox.put(None)  # the end comes after what is before it
                return entries
            entries.append(entry)
            wait_s = 0.0 if entry.urgent else _LAZY_S
            until = min(until or float("inf"), time.monotonic() + wait_s)

    def _commit(self, connection: sqlite3.Connection, entries: Sequence[_Entry]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            connection.execute("BEGIN IMMEDIATE")
            for entry in entries:
                for change in entry.changes:
                    change.apply(connection)
            ledgers = [entry.ledger for entry in entries if entry.ledger is not None]
            for ledger in ledgers[-1:]:
                rows.accounts(ledger).apply(connection)
            connection.execute("COMMIT")
            self._committed = entries[-1].ticket
            for entry in entries:
                if entry.done is not None and entry.ask is not None:
                    entry.done.set_result(entry.ask(connection))
        except Exception as error:  # noqa: BLE001  raised by every later call
            self._failure = self._explained(error)
            if connection.in_transaction:
                connection.rollback()
            for entry in entries:
                if entry.done is not None and not entry.done.done():
                    entry.done.set_exception(self._failure)

    def _explained(self, error: Exception) -> AsyncmoeError:
        if isinstance(error, AsyncmoeError):
            return error
        if not isinstance(error, sqlite3.Error):
            return InvariantBroken(f"journal {self._path}: {type(error).__name__}: {error}")
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith("SQLITE_BUSY"):
            got = f"{self._path.parent}, in use by another controller"
            return UserError("journal", got=got, expected="one controller of a run", hint="end the other one")
        if name.startswith(_LOCKLESS):
            got = f"{self._path.parent}, on a file system without locks"
            return UserError("journal.folder", got=got, expected="a folder on a local disk", hint="name one, or mount this one with locks")
        if name.startswith(_DAMAGED):
            return DataError(str(self._path), got=str(error), expected="a whole journal", hint=_afresh(self._path.parent))
        number = next((number for start, number in _ERRNOS.items() if name.startswith(start)), errno.EIO)
        known = storage.probe(self._path.parent) or OSError(number, str(error))
        then = "then start the run again, or name another journal.folder"
        return storage.explain(known, "the journal", self._path, then) or StorageError(f"the journal: cannot write {self._path}: {error}")


def _check_log(path: Path) -> None:
    """Refuse a damaged write-ahead log, of which SQLite would read the beginning and forget the rest. Raises DataError."""
    log_file = path.with_name(f"{path.name}-wal")
    try:
        log_bytes = log_file.read_bytes()
    except FileNotFoundError:
        return
    if (found := wal.damage(log_bytes)) is not None:
        raise DataError(str(log_file), got=found, expected="a whole journal", hint=_afresh(path.parent))


def _fill(connection: sqlite3.Connection, identity: Mapping[str, str]) -> None:
    for statement in rows.SCHEMA.split(";"):
        connection.execute(statement)
    rows.fact("format", rows.FORMAT).apply(connection)
    rows.fact("identity", json.dumps(identity)).apply(connection)


def _check(facts: Mapping[str, str], identity: Mapping[str, str], folder: Path) -> None:
    """Refuse a journal of something else. Raises DataError."""
    if facts.get("format") != str(rows.FORMAT):
        got = f"format {facts.get('format')}"
        raise DataError(f"journal {folder}", got=got, expected=f"format {rows.FORMAT}", hint=_afresh(folder))
    known = json.loads(facts["identity"])
    for key, value in identity.items():
        if known.get(key) == value:
            continue
        if key == "run":
            hint = f"name another journal.folder, or {_afresh(folder)}"
            raise DataError(f"journal {folder}", got="the journal of another run", expected="this run's", hint=hint)
        hint = f"name another journal.folder, set {key} back, or {_afresh(folder)}"
        raise DataError(f"journal {folder}: {key}", got=known.get(key), expected=value, hint=hint)


def _afresh(folder: Path) -> str:
    return f"delete {folder}: what was queued or under way is then sampled again"


def network_file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the type of the file system of `path` if it is a network's, else None.

    Args:
        mounts: in the format of fstab(5).
    """
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    place = str(path.resolve())
    held = [(len(line[1]), line[2]) for line in lines if len(line) > 2 and f"{place}/".startswith(line[1].rstrip("/") + "/")]
    kind = max(held, default=(0, ""))[1]
    return kind if kind.startswith(_NETWORK) else None
