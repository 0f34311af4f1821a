"""The files of a version store: what it needs of the place where they lie, and a directory as such a place."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from asyncmoe import storage
from asyncmoe.checkpoints.directories import sync_directory
from asyncmoe.errors import AsyncmoeError

T = TypeVar("T")
TEMPORARY = ".writing-"


class StoreFiles(Protocol):
    """Named files. A name is a relative path with "/". Every call ends within a bound, whatever the place does.

    Attributes:
        shown: the place, without credentials, for messages.

    Raises (all calls):
        StorageError: it cannot be written.
        AsyncmoeError: it cannot be read; one line that names the place and the cause.
        WaitTimeout: it does not answer.
    """

    shown: str

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a whole file, in place of one of this name."""

    def read(self, name: str, begin: int = 0, nbytes: int | None = None) -> bytes | None:
        """Return a part of a file, less where the file ends before; None if there is no such file."""

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None if there is no such file."""

    def names(self, folder: str) -> list[str]:
        """Return the names of all files below a folder."""

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""


class Folder:
    """A directory, of this machine or shared. A file is written under a temporary name and then renamed.

    Args:
        durable: a file is on its disk before it gets its name; otherwise a power cut may leave less of it.
    """

    def __init__(self, path: Path, timeout_s: float = 300.0, *, durable: bool = True) -> None:
        self.path, self.shown, self._timeout_s, self._durable = path, str(path), timeout_s, durable

    def write(self, name: str, data: bytes | memoryview) -> None:
        def act() -> None:
            final = self.path / name
            with storage.writing("the version store", final):
                storage.make_private(final.parent)
                written = final.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
                try:
                    with written.open("wb", buffering=0) as file:
                        left = memoryview(data)
                        while left:
                            left = left[file.write(left) :]
                        if self._durable:
                            os.fsync(file.fileno())
                    written.rename(final)
                except OSError:
                    with suppress(OSError):
                        written.unlink()
                    raise
                if self._durable:
                    sync_directory(final.parent)

        storage.within(self._timeout_s, self.shown, f"{name} to be written", act)

    def read(self, name: str, begin: int = 0, nbytes: int | None = None) -> bytes | None:
        def act() -> bytes | None:
            try:
                with (self.path / name).open("rb") as file:
                    file.seek(begin)
                    return file.read(-1 if nbytes is None else nbytes)
            except FileNotFoundError:
                return None

        return self._asked(name, act)

    def size(self, name: str) -> int | None:
        def act() -> int | None:
            try:
                return (self.path / name).stat().st_size
            except FileNotFoundError:
                return None

        return self._asked(name, act)

    def names(self, folder: str) -> list[str]:
        def act() -> list[str]:
            return [str(path.relative_to(self.path)) for path in (self.path / folder).rglob("*") if path.is_file()]

        return self._asked(folder, act)

    def delete(self, name: str) -> None:
        self._asked(name, lambda: (self.path / name).unlink(missing_ok=True))

    def _asked(self, name: str, act: Callable[[], T]) -> T:
        try:
            return storage.within(self._timeout_s, self.shown, name, act)
        except OSError as error:
            raise AsyncmoeError(f"version store {self.shown}: {name}: {error.strerror or error}") from error
