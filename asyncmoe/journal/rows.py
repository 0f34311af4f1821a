"""The tables of the journal, the changes to them and their reading: SQL, and nothing that waits."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from asyncmoe.errors import DataError, InvariantBroken
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
"""


STATEMENTS: Mapping[str, tuple[str, int | None]] = {
    "fact": ("INSERT INTO facts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", 1),
    "begun": (
        "INSERT INTO groups (number, position, state, attempt, failures, lineage) VALUES (?, ?, 'begun', ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET state = 'begun', attempt = excluded.attempt, failures = excluded.failures, lineage = excluded.lineage, "
        "reason = '' WHERE state IN ('begun', 'waiting')",
        1,
    ),
    "queued": (
        "UPDATE groups SET state = 'queued', position = ?, episodes = ?, writer = ?, segment = ?, offset = ?, length = ? "
        "WHERE number = ? AND state = 'begun'",
        1,
    ),
    "ended": (
        "UPDATE groups SET state = ?, reason = ?, writer = NULL, segment = NULL, offset = NULL, length = NULL "
        "WHERE number = ? AND state IN ('begun', 'queued')",
        1,
    ),
    "again": (
        "UPDATE groups SET state = 'waiting', position = ?, attempt = ?, failures = ?, reason = ?, episodes = 0, writer = NULL, "
        "segment = NULL, offset = NULL, length = NULL WHERE number = ? AND state IN ('begun', 'queued')",
        1,
    ),
    "lease": ("INSERT INTO leases (step, count, version, lineage, groups) VALUES (?, ?, ?, ?, ?)", 1),
    "leased": ("UPDATE groups SET state = 'leased', step = ? WHERE number = ? AND state = 'queued'", 1),
    "committed": ("UPDATE leases SET committed = 1, skipped = ? WHERE step = ?", 1),
    "reopened": ("UPDATE leases SET committed = 0, skipped = '' WHERE step >= ?", None),
    "requeued": ("UPDATE groups SET state = 'queued', step = NULL WHERE step = ?", None),
    "released": ("DELETE FROM leases WHERE step = ?", 1),
    "forgotten groups": ("DELETE FROM groups WHERE step < ? OR state IN ('dropped', 'rejected')", None),
    "forgotten leases": ("DELETE FROM leases WHERE step < ?", None),
    "first": ("UPDATE facts SET value = CAST(max(CAST(value AS INTEGER), ?) AS TEXT) WHERE name = 'first'", None),
}
"""By name, each statement that changes the tables, and the number of rows that it must change (None: any). Redis keeps the names."""


@dataclass(frozen=True)
class Change:
    """One of `STATEMENTS` and its values."""

    name: str
    values: Sequence[object] = ()

    def apply(self, connection: sqlite3.Connection) -> None:
        """Carry it out. Raises InvariantBroken if it changes another number of rows."""
        sql, expected = STATEMENTS[self.name]
        changed = connection.execute(sql, self.values).rowcount
        if expected is not None and changed != expected:
            raise InvariantBroken(f"journal: {sql} with {self.values} changed {changed} rows, expected {expected}")


def fact(name: str, value: object) -> Change:
    """Set a fact."""
    return Change("fact", (name, str(value)))


def accounts(now: Accounts) -> Change:
    """Set the ledger."""
    return fact("accounts", msgspec.json.encode(now).decode())


def begun(group: Start, position: int, lineage: int) -> Change:
    """Sampling of a group begins, for the first time or again; then it keeps its place in the order of starts."""
    return Change("begun", (group.number, position, group.attempt, group.failures, lineage))


def queued(number: int, arrival: int, episodes: int, place: Place) -> Change:
    """A group that was begun is finished; its payload is on disk."""
    return Change("queued", (arrival, episodes, place.writer, place.segment, place.offset, place.length, number))


def ended(number: int, state: str, reason: str) -> Change:
    """A group is dropped or rejected for a reason, and does not start again."""
    return Change("ended", (state, reason, number))


def again(group: Start, position: int, reason: str) -> Change:
    """A group fell, or was too old, and is to start again."""
    return Change("again", (position, group.attempt, group.failures, reason, group.number))


def leased(lease: RecordedLease) -> list[Change]:
    """Queued groups are leased."""
    held = msgspec.json.encode([(one.number, one.weight, one.keys) for one in lease.groups]).decode()
    row = (lease.step, lease.count, lease.version, lease.lineage, held)
    return [Change("lease", row), *(Change("leased", (lease.step, one.number)) for one in lease.groups)]


def committed(step: int, skipped: str) -> Change:
    """The step of a lease is over: the trainer has trained on it, or has skipped it for a reason."""
    return Change("committed", (skipped, step))


def reopened(step: int) -> Change:
    """The leases of steps from `step` on are granted again."""
    return Change("reopened", (step,))


def released(step: int) -> list[Change]:
    """A lease ends untrained: its groups are queued again."""
    return [Change("requeued", (step,)), Change("released", (step,))]


def forgotten(floor: int) -> list[Change]:
    """Forget what no run needs that goes back no further than to the checkpoint of step `floor`."""
    return [
        Change("forgotten groups", (floor,)),
        Change("forgotten leases", (floor,)),
        Change("first", (floor,)),
    ]


def make_tables(connection: sqlite3.Connection, identity: Mapping[str, str]) -> None:
    """Make empty tables of a journal that belongs to `identity`."""
    for statement in SCHEMA.split(";"):
        connection.execute(statement)
    fact("format", FORMAT).apply(connection)
    fact("identity", json.dumps(identity)).apply(connection)


def check(connection: sqlite3.Connection, identity: Mapping[str, str], what: str, key: str, afresh: str) -> None:
    """Refuse a journal of something else.

    Args:
        what: the journal, for messages.
        key: of the configuration, which names its place.
        afresh: how to begin a new one.

    Raises:
        DataError: it belongs to something else, or has another format.
    """
    told = facts(connection)
    if told.get("format") != str(FORMAT):
        raise DataError(what, got=f"format {told.get('format')}", expected=f"format {FORMAT}", hint=afresh)
    check_identity(json.loads(told["identity"]), identity, what, key, afresh)


def check_identity(known: Mapping[str, str], identity: Mapping[str, str], what: str, key: str, afresh: str) -> None:
    """Refuse a journal that belongs to `known` for something else. Arguments and errors as for `check`."""
    for name, value in identity.items():
        if known.get(name) == value:
            continue
        if name == "run":
            raise DataError(what, got="the journal of another run", expected="this run's", hint=f"name another {key}, or {afresh}")
        hint = f"set it back, or {afresh}: what was queued or under way is then sampled again"
        raise DataError(name, got=value, expected=f"{known.get(name)}, as the {what} has it", hint=hint)


def is_blank(connection: sqlite3.Connection, identity: Mapping[str, str]) -> bool:
    """Return whether no group was ever begun, so that the journal may belong to anything.

    If it is the journal of `identity` and has steps of the warm-up, a trainer may go on that took them: then it is not blank.
    """
    known = read(connection)
    taken = known.trained and json.loads(facts(connection)["identity"]) == dict(identity)
    return not (known.groups or known.leases or known.next or taken)


def segments(connection: sqlite3.Connection) -> Mapping[int, frozenset[int]]:
    """Return the segments that hold a payload of a group that is not forgotten, by writer."""
    found = defaultdict[int, set[int]](set)
    for writer, number in connection.execute("SELECT DISTINCT writer, segment FROM groups WHERE segment IS NOT NULL"):
        found[writer].add(number)
    return {writer: frozenset(numbers) for writer, numbers in found.items()}


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
