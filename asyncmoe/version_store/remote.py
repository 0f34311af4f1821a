"""A place that fsspec names by a URL, as the files of a version store.

Credentials come from the environment, as the place's package reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from asyncmoe import installed
from asyncmoe.checkpoints.copies import said, without_credentials
from asyncmoe.errors import AsyncmoeError, StorageError, UserError, WaitTimeout
from asyncmoe.storage import within
from asyncmoe.version_store.files import Folder, StoreFiles

T = TypeVar("T")
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "obs", "r2"))
"""fsspec's names of stores without folders."""


def open_files(url: str, key: str, timeout_s: float = 300.0, *, durable: bool = True) -> StoreFiles:
    """Return the files at a URL, or in a directory; no connection is made.

    Args:
        key: names the URL, for errors ("sync.store.url").
        timeout_s: bound of every call.
        durable: see `Folder`; other places decide that themselves.

    Raises:
        UserError: fsspec, or its package for this kind of URL, is not installed, it knows no such kind, or the URL holds a password.
    """
    kind, marked, rest = url.partition("://")
    if not marked or kind in ("file", "local"):
        path = Path(rest if marked else url)
        if not path.is_absolute():
            raise UserError(key, got=without_credentials(url), expected="an absolute path, or a URL")
        return Folder(path, timeout_s, durable=durable)
    if without_credentials(url) != url:
        hint = "give credentials in the environment, as its package reads them (S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        raise UserError(key, got=f"{without_credentials(url)} with a user or password", expected="a URL without them", hint=hint)
    installed.need("fsspec", key)
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, TypeError) as error:  # TypeError: a part of the URL is missing
        got = f"{url}: {' '.join(str(error).split())[:200]}"
        hint = "s3:// needs pip install s3fs, gs:// gcsfs, abfs:// adlfs; a directory needs nothing"
        raise UserError(key, got=got, expected="a URL that fsspec can open", hint=hint) from error
    return RemoteFiles(files, root.rstrip("/"), url.rstrip("/"), timeout_s)


class RemoteFiles:
    """StoreFiles in fsspec's file system. See `StoreFiles`."""

    def __init__(self, files: Any, root: str, shown: str, timeout_s: float) -> None:
        self._files, self._root, self.shown, self._timeout_s = files, root, shown, timeout_s
        kinds = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
        self._folders = not _BUCKETS.intersection(kinds)  # in a bucket, making one would only make a bucket of a mistyped name

    def write(self, name: str, data: bytes | memoryview) -> None:
        def act() -> None:
            path = self._path(name)
            if self._folders:
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, bytes(data))

        self._asked(name, act, StorageError, "cannot write ")

    def read(self, name: str, begin: int = 0, nbytes: int | None = None) -> bytes | None:
        def act() -> bytes | None:
            if nbytes == 0:
                return b""
            end = None if nbytes is None else begin + nbytes
            try:
                return bytes(self._files.cat_file(self._path(name), start=begin if nbytes is not None or begin else None, end=end))
            except FileNotFoundError:
                return None

        return self._asked(name, act)

    def size(self, name: str) -> int | None:
        def act() -> int | None:
            path = self._path(name)
            self._files.invalidate_cache(path.rpartition("/")[0])
            try:
                return int(self._files.info(path)["size"])
            except FileNotFoundError:
                return None

        return self._asked(name, act)

    def names(self, folder: str) -> list[str]:
        def act() -> list[str]:
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._path(folder))
            except FileNotFoundError:
                return []
            return [str(path)[len(self._root) + 1 :] for path in found]

        return self._asked(folder, act)

    def delete(self, name: str) -> None:
        def act() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

        self._asked(name, act)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _asked(self, name: str, act: Callable[[], T], kind: type[AsyncmoeError] = AsyncmoeError, verb: str = "") -> T:
        try:
            return within(self._timeout_s, self.shown, name, act)
        except WaitTimeout:
            raise
        except Exception as error:
            raise kind(f"version store {self.shown}: {verb}{name}: {said(error)}") from error
