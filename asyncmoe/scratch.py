"""Private folders for the sockets of this process and the temporary files of its children. SGLang and torchrun leave such files behind,
especially when killed.

A folder is private to this user, and locked by the process that made it. Making the next one removes folders whose maker has ended.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from asyncmoe.storage import writing

VARIABLE = "ASYNCMOE_SCRATCH"
"""Environment variable with the name of the folder."""
_PREFIX, _LOCK = "asyncmoe-", ".lock"
_NAME = f"{_PREFIX}{'[a-z0-9_]' * 8}"
"""Glob pattern of the names `mkdtemp` makes from the prefix."""


class Scratch:
    """A new folder. Making it removes folders left by ended processes of this user.

    Raises:
        StorageError: the folder cannot be created.
    """

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        for old in base.glob(_NAME):
            _remove_if_left(old)
        with writing("folder for temporary files", base):
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            made = self.path / f"{_LOCK}.new"
            self._lock: IO[str] = made.open("w")
            with suppress(OSError):  # a file system may lack locks; then leftovers stay
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            made.rename(self.path / _LOCK)  # no process finds it unlocked

    def environment(self) -> dict[str, str]:
        """Return the variables that make a child process use the folder; compiled kernels, worth keeping, stay outside it."""
        name = f"torchinductor_{os.geteuid()}"
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(own_folder(name) or self.path / name)
        return {"TMPDIR": str(self.path), VARIABLE: self.path.name, "TORCHINDUCTOR_CACHE_DIR": compiled}

    def remove(self) -> None:
        """Remove the folder, after the processes that use it have ended. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def own_folder(name: str) -> Path | None:
    """Return a folder for temporary files that later processes reuse; None if another user may have written to it. What compilers leave
    there is executed."""
    kept = Path(tempfile.gettempdir()) / name
    with suppress(OSError):
        kept.mkdir(mode=0o700, exist_ok=True)
        found = kept.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            kept.chmod(0o700)
            return kept
    return None


def is_private(folder: Path) -> bool:
    """Whether the path is a directory, not a link, that belongs to this user and that nobody else may enter."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # another process may remove it at the same time
        if not is_private(folder):
            return
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
