"""The states of groups and leases: one thread that owns the tables, and many changes in one transaction.

Changes are made in the order in which they were given: after any stop the store holds the first n of them.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from asyncmoe.errors import AsyncmoeError, WaitTimeout
from asyncmoe.journal import rows
from asyncmoe.journal.rows import Change
from asyncmoe.journal.states_file import StatesFile
from asyncmoe.queue.accounts import Accounts

T = TypeVar("T")
_LAZY_S = 0.1
"""Seconds that changes nobody waits for may wait for others, so that they share an fsync."""
_STORE_S = 300.0
"""Seconds after which a store counts as hung."""


class StatesStore(Protocol):
    """Where the tables are kept. All methods are called by the thread of one `States`."""

    name: str
    """For messages: what is waited for."""

    def connect(self) -> sqlite3.Connection:
        """Return the tables as they were kept; empty ones if there are none.

        Raises:
            DataError: they belong to something else, have another format, or are damaged.
            UserError: another process has them open.
            StorageError: they cannot be written.
        """
        ...

    def keep(self, changes: Sequence[Change]) -> None:
        """Keep what an open transaction has changed; it is committed next, and on disk then."""
        ...

    def compact(self, connection: sqlite3.Connection) -> None:
        """Free what was kept for rows that are deleted by now."""
        ...

    def explained(self, error: Exception) -> AsyncmoeError:
        """Return the error for the user."""
        ...

    def close(self) -> None:
        """Let go of the tables."""
        ...


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

    def claimed(self) -> _Entry:
        """Return the entry without its question if nobody waits for the answer any more; else its future can no longer be cancelled."""
        if self.done is None or self.done.set_running_or_notify_cancel():
            return self
        return replace(self, ask=None, done=None)


class States:
    """The tables of one journal. `write` and `durable` are for one event loop.

    Attributes:
        tickets: number of `write` calls; a change is on disk when the ticket of its call is.
    """

    def __init__(self, store: StatesStore) -> None:
        """Open the tables of a store. Blocks. Raises as `StatesStore.connect`."""
        self._store = store
        self.tickets = self._committed = 0
        self._failure: AsyncmoeError | None = None
        self._inbox: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, args=(opened,), name="journal states", daemon=True)
        self._thread.start()
        self._waited(opened)

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, str]) -> States:
        """Open or make the file of a folder; see `StatesFile`."""
        file = StatesFile(folder, identity)
        file.make()
        return cls(file)

    def write(self, changes: Sequence[Change], ledger: Accounts | None = None, *, urgent: bool = False) -> int:
        """Hand over changes, which are made together or not at all. Never waits.

        Args:
            ledger: the queue's after the changes.
            urgent: do not wait for others to share the fsync.

        Returns:
            their ticket, for `durable`.

        Raises:
            StorageError: the store failed before.
        """
        if self._failure is not None:
            raise self._failure
        self.tickets += 1
        self._inbox.put(_Entry(self.tickets, changes, ledger, urgent))
        return self.tickets

    async def durable(self, ticket: int) -> None:
        """Wait until the changes of a ticket are on disk.

        Raises:
            StorageError, UserError: the store failed.
            WaitTimeout: it did not answer.
        """
        if self._failure is not None:
            raise self._failure
        if ticket > self._committed:
            await self.ask(lambda connection: None)

    async def ask(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """Return what a function finds in the tables once all changes so far are on disk; it runs in their thread.

        Raises as `durable`.
        """
        try:
            async with asyncio.timeout(_STORE_S):
                return await asyncio.wrap_future(self._ask(question))
        except TimeoutError:
            raise WaitTimeout(self._store.name, "the journal to be written", _STORE_S) from None

    def read(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """As `ask`, but block."""
        return self._waited(self._ask(question))

    async def compact(self) -> None:
        """Free what the store keeps for rows that are deleted. Raises as `durable`."""
        await self.ask(self._store.compact)

    def close(self) -> None:
        """Write what was handed over, and close the tables. A second call does nothing."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(_STORE_S)

    def _waited(self, future: Future[T]) -> T:
        try:
            return future.result(_STORE_S)
        except FutureTimeout:
            raise WaitTimeout(self._store.name, "the journal to be written", _STORE_S) from None

    def _ask(self, question: Callable[[sqlite3.Connection], T]) -> Future[T]:
        done: Future[T] = Future()
        if self._failure is not None:
            done.set_exception(self._failure)
        else:
            self._inbox.put(_Entry(self.tickets, (), urgent=True, ask=question, done=done))
        return done

    # ------------------------------------------------------------ the thread

    def _serve(self, opened: Future[None]) -> None:
        try:
            connection = self._store.connect()
        except Exception as error:  # noqa: BLE001  raised by `__init__`
            self._store.close()
            opened.set_exception(self._store.explained(error))
            return
        opened.set_result(None)
        try:
            while entries := self._take():
                self._commit(connection, entries)
        finally:
            connection.close()
            self._store.close()

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
            entries.append(entry.claimed())
            wait_s = 0.0 if entry.urgent else _LAZY_S
            until = min(until or float("inf"), time.monotonic() + wait_s)

    def _commit(self, connection: sqlite3.Connection, entries: Sequence[_Entry]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            changes = [change for entry in entries for change in entry.changes]
            ledgers = [entry.ledger for entry in entries if entry.ledger is not None]
            changes += [rows.accounts(ledger) for ledger in ledgers[-1:]]
            if changes:
                connection.execute("BEGIN IMMEDIATE")
                for change in changes:
                    change.apply(connection)
                self._store.keep(changes)
                connection.execute("COMMIT")
            self._committed = entries[-1].ticket
            for entry in entries:
                if entry.done is not None and entry.ask is not None:
                    entry.done.set_result(entry.ask(connection))
        except Exception as error:  # noqa: BLE001  raised by every later call
            self._failure = self._store.explained(error)
            if connection.in_transaction:
                connection.rollback()
            for entry in entries:
                if entry.done is not None and not entry.done.done():
                    entry.done.set_exception(self._failure)
