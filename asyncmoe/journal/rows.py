"""The tables of the journal, the changes to them and their reading: SQL, and nothing that waits."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from asyncmoe.errors import InvariantBroken
from asyncmoe.journal.recovery import JournalRows, LeasedGroup, RecordedGroup, RecordedLease
from asyncmoe.journal.segment_format import Place
from asyncmoe.queue.accounts import Accounts
from asyncmoe.queue.start_order import Start

FORMAT = 1
SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, position INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('begun', 'waiting', 'queued', 'leased', 'dropped', 'rejected')),
    attempt INTEGER NOT NULL, failures INTEGER NOT NULL, lineage INTEGER NOT NULL, reason TEXT NOT NULL DEFAULT '',
    step INTEGER, episodes INTEGER NOT NULL DEFAULT 0, writer INTEGER, segment INTEGER, offset INTEGER, length INTEGER,
    CHECK ((state = 'leased') = (step IS NOT NULL)), CHECK (state NOT IN ('queued', 'leased') OR length IS NOT NULL)
);
CREATE TABLE leases (
    step INTEGER PRIMARY KEY, count INTEGER NOT NULL, version INTEGER NOT NULL, lineage INTEGER NOT NULL,
    committed INTEGER NOT NULL DEFAULT 0, skipped TEXT NOT NULL DEFAULT '', groups TEXT NOT NULL
);
CREATE TABLE draws (
    number INTEGER PRIMARY KEY, what TEXT NOT NULL CHECK (what IN ('drawn', 'measured', 'closed')), "group" INTEGER NOT NULL,
    source INTEGER NOT NULL, example INTEGER NOT NULL, passed INTEGER NOT NULL, responses INTEGER NOT NULL
);
"""


@dataclass(frozen=True)
class Change:
    """One statement, its values, and the number of rows that it must change (None: any)."""

    sql: str
    values: Sequence[object] = ()
    rows: int | None = None

    def apply(self, connection: sqlite3.Connection) -> None:
        """Carry it out. Raises InvariantBroken if it changes another number of rows."""
        changed = connection.execute(self.sql, self.values).rowcount
        if self.rows is not None and changed != self.rows:
            raise InvariantBroken(f"journal: {self.sql} with {self.values} changed {changed} rows, expected {self.rows}")


@dataclass(frozen=True)
class Draw:
    """One event of the curriculum: a prompt was drawn for a group, the group was measured, or it was closed.

    Attributes:
        number: of the event, from 1.
        what: "drawn", "measured" or "closed".
        source, example: the prompt.
        passed, responses: "measured": how many of how many responses passed.
    """

    number: int
    what: str
    group: int
    source: int = 0
    example: int = 0
    passed: int = 0
    responses: int = 0


def fact(name: str, value: object) -> Change:
    """Set a fact."""
    return Change("INSERT INTO facts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", (name, str(value)), 1)


def accounts(now: Accounts) -> Change:
    """Set the ledger."""
    return fact("accounts", msgspec.json.encode(now).decode())


def begun(group: Start, position: int, lineage: int) -> Change:
    """Sampling of a group begins, for the first time or again; then it keeps its place in the order of starts."""
    return Change(
        "INSERT INTO groups (number, position, state, attempt, failures, lineage) VALUES (?, ?, 'begun', ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET state = 'begun', attempt = excluded.attempt, failures = excluded.failures, lineage = excluded.lineage, "
        "reason = '' WHERE state IN ('begun', 'waiting')",
        (group.number, position, group.attempt, group.failures, lineage),
        1,
    )


def queued(number: int, arrival: int, episodes: int, place: Place) -> Change:
    """A group that was begun is finished; its payload is on disk."""
    return Change(
        "UPDATE groups SET state = 'queued', position = ?, episodes = ?, writer = ?, segment = ?, offset = ?, length = ? "
        "WHERE number = ? AND state = 'begun'",
        (arrival, episodes, place.writer, place.segment, place.offset, place.length, number),
        1,
    )


def ended(number: int, state: str, reason: str) -> Change:
    """A group is dropped or rejected for a reason, and does not start again."""
    return Change(
        "UPDATE groups SET state = ?, reason = ?, writer = NULL, segment = NULL, offset = NULL, length = NULL "
        "WHERE number = ? AND state IN ('begun', 'queued')",
        (state, reason, number),
        1,
    )


def again(group: Start, position: int, reason: str) -> Change:
    """A group fell, or was too old, and is to start again."""
    return Change(
        "UPDATE groups SET state = 'waiting', position = ?, attempt = ?, failures = ?, reason = ?, episodes = 0, writer = NULL, "
        "segment = NULL, offset = NULL, length = NULL WHERE number = ? AND state IN ('begun', 'queued')",
        (position, group.attempt, group.failures, reason, group.number),
        1,
    )


def leased(lease: RecordedLease) -> list[Change]:
    """Queued groups are leased."""
    held = msgspec.json.encode([(one.number, one.weight, one.keys) for one in lease.groups]).decode()
    row = (lease.step, lease.count, lease.version, lease.lineage, held)
    each = (
        Change("UPDATE groups SET state = 'leased', step = ? WHERE number = ? AND state = 'queued'", (lease.step, one.number), 1)
        for one in lease.groups
    )
    return [Change("INSERT INTO leases (step, count, version, lineage, groups) VALUES (?, ?, ?, ?, ?)", row, 1), *each]


def committed(step: int, skipped: str) -> Change:
    """The step of a lease is over: the trainer has trained on it, or has skipped it for a reason."""
    return Change("UPDATE leases SET committed = 1, skipped = ? WHERE step = ?", (skipped, step), 1)


def reopened(step: int) -> Change:
    """The leases of steps from `step` on are granted again."""
    return Change("UPDATE leases SET committed = 0, skipped = '' WHERE step >= ?", (step,))


def released(step: int) -> list[Change]:
    """A lease ends untrained: its groups are queued again."""
    return [
        Change("UPDATE groups SET state = 'queued', step = NULL WHERE step = ?", (step,)),
        Change("DELETE FROM leases WHERE step = ?", (step,), 1),
    ]


def drew(draw: Draw) -> Change:
    """An event of the curriculum."""
    values = (draw.number, draw.what, draw.group, draw.source, draw.example, draw.passed, draw.responses)
    return Change("INSERT INTO draws VALUES (?, ?, ?, ?, ?, ?, ?)", values, 1)


def forgotten(floor: int, draws: int) -> list[Change]:
    """Forget what no run needs that goes back no further than to the checkpoint of step `floor`, which holds the events up to `draws`."""
    return [
        Change("DELETE FROM groups WHERE step < ? OR state IN ('dropped', 'rejected')", (floor,)),
        Change("DELETE FROM leases WHERE step < ?", (floor,)),
        Change("DELETE FROM draws WHERE number <= ?", (draws,)),
        Change("UPDATE facts SET value = CAST(max(CAST(value AS INTEGER), ?) AS TEXT) WHERE name = 'first'", (floor,)),
    ]


def segments(connection: sqlite3.Connection) -> frozenset[int]:
    """Return the segments that hold a payload of a group that is not forgotten."""
    return frozenset(number for (number,) in connection.execute("SELECT DISTINCT segment FROM groups WHERE segment IS NOT NULL"))


def draws(connection: sqlite3.Connection, after: int) -> list[Draw]:
    """Return the events of the curriculum after the one of this number, in order."""
    return [Draw(*row) for row in connection.execute("SELECT * FROM draws WHERE number > ? ORDER BY number", (after,))]


def facts(connection: sqlite3.Connection) -> Mapping[str, str]:
    """Return all facts."""
    return dict(connection.execute("SELECT name, value FROM facts"))


def read(connection: sqlite3.Connection) -> JournalRows:
    """Return all groups and leases."""
    known = facts(connection)
    return JournalRows(
        {group.number: group for group in _groups(connection)},
        {lease.step: lease for lease in _leases(connection)},
        int(known["first"]) if "first" in known else None,
        int(known.get("next", 0)),
        int(known.get("lineage", 0)),
        _accounts(known["accounts"]) if "accounts" in known else None,
        int(known["trained"]) if "trained" in known else None,
    )


def _groups(connection: sqlite3.Connection) -> list[RecordedGroup]:
    named = "number, position, state, attempt, failures, step, episodes, writer, segment, offset, length"
    return [
        RecordedGroup(number, order, state, attempt, failures, step, episodes, None if place[3] is None else Place(*place))
        for number, order, state, attempt, failures, step, episodes, *place in connection.execute(f"SELECT {named} FROM groups")
    ]


def _leases(connection: sqlite3.Connection) -> list[RecordedLease]:
    every = connection.execute("SELECT step, count, version, lineage, committed, groups, skipped FROM leases")
    return [
        RecordedLease(step, count, version, lineage, bool(done), _held(held), skipped)
        for step, count, version, lineage, done, held, skipped in every
    ]


_Held = tuple[int, float, tuple[str, ...]]


def _held(text: str) -> tuple[LeasedGroup, ...]:
    return tuple(LeasedGroup(*one) for one in msgspec.json.decode(text, type=tuple[_Held, ...]))


def _accounts(text: str) -> Accounts:
    return msgspec.json.decode(text, type=Accounts)
