"""Bounded logs of child processes: a thread moves what a child has written to FILE.1, FILE.2, ... and truncates the file.

The child writes to the file itself, opened for appending, so it needs nobody to go on; the file keeps its name and its inode
("copytruncate" of logrotate(8)). What is written in the instant between the end of the copy and the truncation is lost.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

_LOOK_S = 2.0


class BoundedLog:
    """One child's log: moved when it has more than `max_bytes`, and `keep` moved parts are kept. Its part from an earlier process, which
    it appends to, counts too."""

    def __init__(self, path: Path, max_bytes: int = 64 << 20, keep: int = 3) -> None:
        self.path, self._max_bytes, self._keep = path, max_bytes, keep
        self._start = path.stat().st_size if path.exists() else 0
        self._moved_from: int | None = None
        """Where the child's output begins in the newest moved part; None: nothing was moved."""
        self._lock = threading.Lock()
        _Keeper.watch(self)

    def output(self) -> str:
        """Return what the child has written, as far as the log and the newest moved part have it."""
        with self._lock:
            before = b""
            if self._moved_from is not None:
                before = _part(self.path, 1).read_bytes()[self._moved_from :]
            with self.path.open("rb") as file:
                file.seek(self._start)
                return (before + file.read()).decode(errors="replace")

    def trim(self) -> bool:
        """Move the log if it is too large; return whether it was moved."""
        # A full disk, or a folder that somebody moved: the log stays as it is, and the next look tries again.
        with self._lock, suppress(OSError):
            if self.path.stat().st_size > self._max_bytes:
                self._move()
                return True
        return False

    def _move(self) -> None:
        part = self.path.with_name(f"{self.path.name}.part")
        with self.path.open("rb+") as log:
            try:
                with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self.path.stat().st_mode & 0o777), "wb") as copy:
                    shutil.copyfileobj(log, copy, 1 << 20)
            except OSError:
                part.unlink(missing_ok=True)
                raise
            for number in range(self._keep - 1, 0, -1):
                with suppress(FileNotFoundError):
                    _part(self.path, number).replace(_part(self.path, number + 1))
            part.replace(_part(self.path, 1))
            log.truncate(0)
        self._start, self._moved_from = 0, self._start


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


class _Keeper:
    """The thread of this process that looks at all of its children's logs."""

    _logs: ClassVar[weakref.WeakSet[BoundedLog]] = weakref.WeakSet()
    _lock = threading.Lock()
    _thread: threading.Thread | None = None

    @classmethod
    def watch(cls, log: BoundedLog) -> None:
        with cls._lock:
            cls._logs.add(log)
            if cls._thread is None:
                cls._thread = threading.Thread(target=cls._run, name="logs", daemon=True)
                cls._thread.start()

    @classmethod
    def _run(cls) -> None:
        while True:
            time.sleep(_LOOK_S)
            with cls._lock:
                logs = list(cls._logs)
            for log in logs:
                log.trim()
