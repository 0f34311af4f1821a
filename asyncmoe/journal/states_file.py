"""The states of groups and leases in a file of SQLite: write-ahead log, an fsync at every commit (synchronous=FULL).

No other process can open the file meanwhile (locking_mode=EXCLUSIVE, which needs no shared memory).
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncmoe import storage
from asyncmoe.errors import AsyncmoeError, DataError, InvariantBroken, StorageError, UserError
from asyncmoe.journal import rows, wal
from asyncmoe.journal.rows import Change
from asyncmoe.journal.segment_folder import check_private

log = logging.getLogger(__name__)
FILE = "states.sqlite"
_KEY = "journal.folder"
_ERRNOS = {"SQLITE_FULL": errno.ENOSPC, "SQLITE_READONLY": errno.EROFS, "SQLITE_IOERR": errno.EIO, "SQLITE_CANTOPEN": errno.EACCES}
_LOCKLESS = ("SQLITE_IOERR_LOCK", "SQLITE_IOERR_RDLOCK", "SQLITE_IOERR_UNLOCK", "SQLITE_IOERR_CHECKRESERVEDLOCK", "SQLITE_PROTOCOL")
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_SCHEMA", "SQLITE_ERROR")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "glusterfs", "fuse.")


class StatesFile:
    """The file of a folder. A `StatesStore`.

    Args:
        identity: what a journal belongs to, in the user's terms: {"run.seed": "3"}.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self._folder, self._path, self._identity = folder, folder / FILE, identity
        self.name = f"the disk of {self._path}"

    def make(self) -> None:
        """Make the folder (mode 0700) and an empty file (mode 0600), unless they exist.

        Raises:
            UserError: the folder cannot be made.
            DataError: it belongs to or is open to other users.
            StorageError: they cannot be written.
        """
        with storage.writing("the journal", self._folder):
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except FileNotFoundError as error:
                raise UserError(_KEY, got=f"{self._folder}, which cannot be made ({error.strerror})", expected="a folder") from error
            check_private(self._folder, self._folder.stat())
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        if (kind := network_file_system(self._folder)) is not None:
            log.warning(
                "the journal is on a network file system (%s at %s), which may be slow; journal.folder names another", kind, self._folder
            )

    def connect(self) -> sqlite3.Connection:
        """Open the file; see `StatesStore`."""
        connection = sqlite3.connect(self._path, timeout=0.0, isolation_level=None)
        try:
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                connection.execute(f"PRAGMA {pragma}").fetchall()
            connection.execute("BEGIN IMMEDIATE")  # from here on nobody else writes
            self._check_log()
            if not connection.execute("SELECT name FROM sqlite_master").fetchall():
                rows.make_tables(connection, self._identity)
            connection.execute("COMMIT")
            # The log begins anew, so that what an earlier start has left behind its end is not taken for damage.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                got = " ".join(found.split())[:200]
                raise DataError(str(self._path), got=got, expected="a whole journal", hint=_afresh(self._folder))
            rows.check(connection, self._identity, f"journal {self._folder}", _KEY, _afresh(self._folder))
        except BaseException:
            connection.close()
            raise
        return connection

    def keep(self, changes: Sequence[Change]) -> None:
        """Do nothing: the commit that follows writes to the disk."""

    def compact(self, connection: sqlite3.Connection) -> None:
        """Do nothing: SQLite uses the room of deleted rows again."""

    def explained(self, error: Exception) -> AsyncmoeError:
        """Return the error for the user."""
        if isinstance(error, AsyncmoeError):
            return error
        if not isinstance(error, sqlite3.Error):
            return InvariantBroken(f"journal {self._path}: {type(error).__name__}: {error}")
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith("SQLITE_BUSY"):
            got = f"{self._folder}, in use by another controller"
            return UserError("journal", got=got, expected="one controller of a run", hint="end the other one")
        if name.startswith(_LOCKLESS):
            got = f"{self._folder}, on a file system without locks"
            return UserError(_KEY, got=got, expected="a folder on a local disk", hint="name one, or mount this one with locks")
        if name.startswith(_DAMAGED):
            return DataError(str(self._path), got=str(error), expected="a whole journal", hint=_afresh(self._folder))
        number = next((number for start, number in _ERRNOS.items() if name.startswith(start)), errno.EIO)
        known = storage.probe(self._folder) or OSError(number, str(error))
        then = f"then start the run again, or name another {_KEY}"
        return storage.explain(known, "the journal", self._path, then) or StorageError(f"the journal: cannot write {self._path}: {error}")

    def close(self) -> None:
        """Do nothing: the connection holds the file."""

    def _check_log(self) -> None:
        """Refuse a damaged write-ahead log, of which SQLite would read the beginning and forget the rest. Raises DataError."""
        log_file = self._path.with_name(f"{FILE}-wal")
        try:
            log_bytes = log_file.read_bytes()
        except FileNotFoundError:
            return
        if (found := wal.damage(log_bytes)) is not None:
            raise DataError(str(log_file), got=found, expected="a whole journal", hint=_afresh(self._folder))


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
