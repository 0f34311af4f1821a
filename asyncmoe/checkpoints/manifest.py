"""The manifest of a checkpoint: size and CRC-32C of each of its files, in `manifest.json`.

It detects files that are missing, truncated, or changed by a disk, a copy or a network. It protects against damage, not attackers.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

from asyncmoe import storage
from asyncmoe.errors import DataError, UserError

MANIFEST = "manifest.json"
_FORMAT = 1
_PIECE_BYTES = 8 << 20
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)
"""Read errors that mean a damaged checkpoint. Any other, such as EACCES or ESTALE, is a fault of the machine."""


@dataclass(frozen=True)
class Sealed:
    """A file's size in bytes and CRC-32C (RFC 3720, appendix B.4) when it was written."""

    nbytes: int
    crc32c: int


Manifest = Mapping[str, Sealed]
"""Sealed files by name: the path below the checkpoint's directory, with "/" between its parts."""


def seal(path: Path, *, sync: bool = False) -> Sealed:
    """Read a file, and return its size and digest.

    Args:
        sync: also sync the file to disk.

    Raises:
        OSError: the file cannot be read or synced.
    """
    from asyncmoe.trajectory.native import crc32c  # commands that start no process work without the extension

    buffer = memoryview(bytearray(_PIECE_BYTES))
    total = digest = 0
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            digest = crc32c(buffer[:count], digest)
            total += count
    return Sealed(total, digest)


def text_of(manifest: Manifest) -> bytes:
    """Return the content of `manifest.json`, which `parse` reads."""
    files = {name: [one.nbytes, f"{one.crc32c:08x}"] for name, one in sorted(manifest.items())}
    return json.dumps({"format": _FORMAT, "digest": "crc32c", "files": files, "check": _check(files)}, indent=1).encode()


def write(directory: Path, manifest: Manifest) -> None:
    """Write and sync `manifest.json`."""
    storage.replace(directory / MANIFEST, text_of(manifest), durable=True)


def read(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        DataError: it is missing or damaged.
        UserError: it has a later format, or cannot be read here although it may be intact.
    """
    path = directory / MANIFEST
    try:
        return parse(path.read_bytes(), path)
    except OSError as error:
        raise _damaged(path, unreadable(path, error)) from error


def unreadable(path: Path, error: OSError) -> str:
    """Return the reason why a checkpoint's file is damaged, if `error` shows that it is.

    Raises:
        UserError: the file may be intact, but this process cannot read it.
    """
    if error.errno in _DAMAGE:
        return str(error.strerror)
    raise UserError(
        str(path), got=error.strerror, expected="a readable file", hint="nothing was changed; start again once it is readable"
    ) from error


def names_in(directory: Path) -> list[str]:
    """Return the names of all files in a checkpoint that its manifest must list, sorted."""
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def missing_or_cut(directory: Path, manifest: Manifest) -> str | None:
    """Compare all sizes; return the first file that differs and how, or None."""
    for name, sealed in sorted(manifest.items()):
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read ({unreadable(directory / name, error)})"
        if size != sealed.nbytes:
            return f"{name} has {size} bytes, expected {sealed.nbytes}"
    return None


def changed(directory: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """Read files and compare their digests; return the first that differs and how, or None."""
    for name in names:
        try:
            found = seal(directory / name)
        except OSError as error:
            return f"{name} cannot be read ({unreadable(directory / name, error)})"
        if found != manifest[name]:
            return f"{name} has other content (CRC-32C {found.crc32c:08x}, expected {manifest[name].crc32c:08x})"
    return None


def smallest(manifest: Manifest, most_bytes: int) -> list[str]:
    """Return the names of the smallest files that have at most `most_bytes` together."""
    names = sorted(manifest, key=lambda name: (manifest[name].nbytes, name))
    totals = accumulate(manifest[name].nbytes for name in names)
    return [name for name, total in zip(names, totals, strict=True) if total <= most_bytes]


def share(manifest: Manifest, rank: int, world: int) -> list[str]:
    """Return the names of the files that a rank verifies: together the ranks verify every file, with about equal bytes each."""
    return sorted(manifest, key=lambda name: (-manifest[name].nbytes, name))[rank::world]


def parse(text: bytes, path: Path) -> Manifest:
    """Parse a manifest's text, for example a copy's. `path` names it in errors. Raises as `read`."""
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise _damaged(path, type(values).__name__)
        if values.get("format") != _FORMAT:
            got = f"format {str(values.get('format'))[:20]}"
            raise UserError(str(path), got=got, expected=f"format {_FORMAT}", hint="a later asyncmoe wrote it; use that version")
        files = values["files"]
        if values["check"] != _check(files):
            raise _damaged(path, "content that does not match its own checksum")
        return dict(_entries(files))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {' '.join(str(error).split())[:100]}") from error


def _entries(files: Mapping[str, Any]) -> Iterator[tuple[str, Sealed]]:
    for name, (nbytes, digest) in files.items():
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\0" in name:
            raise ValueError(f"a file named {name!r}, outside the checkpoint")
        yield name, Sealed(int(nbytes), int(digest, 16))


def _check(files: Mapping[str, Any]) -> str:
    from asyncmoe.trajectory.native import crc32c

    return f"{crc32c(json.dumps(files, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _damaged(path: Path, got: str) -> DataError:
    return DataError(str(path), got=got, expected="the manifest of a checkpoint")
