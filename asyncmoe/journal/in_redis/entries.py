"""The bytes of an entry of the stream, and of a snapshot of all rows. Pure.

Both are a checksum (CRC-32C, 4 bytes, little-endian) and msgpack. The checksum begins with that of the key and number: no entry of another
run or place is taken for one of this.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Sequence

import msgspec

from asyncmoe.errors import DataError
from asyncmoe.journal.rows import STATEMENTS, Change
from asyncmoe.trajectory import Buffer
from asyncmoe.trajectory.native import crc32c

CRC = struct.Struct("<I")
_Value = int | str | None
_TABLES = {"facts": 2, "groups": 13, "leases": 7}
"""Columns of each."""
_FORMER = {"drew", "forgotten draws"}
"""Changes of a table that journals had once; nothing depends on it."""


def seal(parts: Sequence[Buffer], place: str) -> bytes:
    """Join parts, behind their checksum.

    Args:
        place: key and number.
    """
    digest = crc32c(place.encode())
    for part in parts:
        digest = crc32c(part, digest)
    return b"".join([CRC.pack(digest), *parts])


def opened(data: Buffer | None, place: str) -> memoryview:
    """Return what `seal` joined. Raises DataError if it is absent or damaged; names the place."""
    view = memoryview(data or b"")
    if len(view) < CRC.size:
        raise DataError(place, got="nothing" if data is None else f"{len(view)} bytes", expected="what the journal wrote")
    if CRC.unpack_from(view)[0] != crc32c(view[CRC.size :], crc32c(place.encode())):
        raise DataError(place, got="a wrong checksum", expected="what the journal wrote")
    return view[CRC.size :]


def pack(changes: Sequence[Change], place: str) -> bytes:
    """Return the entry of a transaction."""
    return seal([msgspec.msgpack.encode([(change.name, change.values) for change in changes])], place)


def unpack(data: Buffer | None, place: str) -> list[Change]:
    """Return the changes of an entry. Raises DataError if it is damaged, or names an unknown statement."""
    try:
        found = msgspec.msgpack.decode(opened(data, place), type=list[tuple[str, tuple[_Value, ...]]])
    except msgspec.MsgspecError as error:
        raise DataError(place, got=str(error), expected="changes of the journal's tables") from error
    if unknown := {name for name, _ in found} - set(STATEMENTS) - _FORMER:
        raise DataError(place, got=f"the change {min(unknown)!r}", expected="changes that this version knows")
    return [Change(name, values) for name, values in found if name in STATEMENTS]


def snapshot(connection: sqlite3.Connection, place: str) -> bytes:
    """Return all rows."""
    return seal([msgspec.msgpack.encode({table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in _TABLES})], place)


def restore(connection: sqlite3.Connection, data: Buffer | None, place: str) -> None:
    """Fill empty tables with a snapshot. Raises DataError if it is damaged."""
    try:
        found = msgspec.msgpack.decode(opened(data, place), type=dict[str, list[tuple[_Value, ...]]])
        for table, columns in _TABLES.items():
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})", found[table])
    except (msgspec.MsgspecError, KeyError, sqlite3.Error) as error:
        raise DataError(place, got=f"{type(error).__name__}: {error}", expected="rows of the journal's tables") from error
