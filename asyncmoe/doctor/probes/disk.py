"""Test writes, renames and locks in a directory, and measure its free space."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

from asyncmoe.doctor.facts import Disk

_WRITTEN = 1 << 20
"""Bytes to write: enough to hit a full disk or an exhausted quota."""


def look(directory: Path, checkpoints: int, mounts: Path = Path("/proc/self/mounts")) -> Disk:
    """Test `directory` or its nearest existing parent. The test files are deleted."""
    absolute = directory.absolute()
    probed = next(path for path in (absolute, *absolute.parents) if path.exists())
    room = os.statvfs(probed)
    ahead, trouble = _try(probed)
    return Disk(
        directory=str(directory),
        probed=str(probed),
        kind=kind_of(probed.resolve(), mounts.read_text() if mounts.is_file() else ""),
        free_bytes=room.f_bavail * room.f_frsize,
        free_files=room.f_favail if room.f_files else None,
        checkpoints=checkpoints,
        ahead_s=ahead,
        trouble=trouble,
    )


def kind_of(path: Path, mounts: str) -> str:
    """Return the type of a path's file system from /proc/self/mounts; the last of the longest matching mount points wins."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        point, name = (part.encode().decode("unicode_escape") for part in line.split()[1:3])
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), name
    return kind


def _try(directory: Path) -> tuple[float | None, str | None]:
    """Return the seconds by which the file system's clock is ahead, or the first failed operation."""
    doing = "making a directory"
    try:
        with tempfile.TemporaryDirectory(prefix=".asyncmoe-doctor-", dir=directory) as made:
            first, second = Path(made) / "first", Path(made) / "second"
            doing = "writing a file"
            now = time.time()
            _write(first)
            ahead = first.stat().st_mtime - now
            _write(second)
            doing = "renaming over a file"
            first.replace(second)
            doing = "renaming a directory"
            (Path(made) / "writing").mkdir()
            (Path(made) / "writing").rename(Path(made) / "done")
            doing = "locking a file"
            with second.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            doing = "deleting"
    except OSError as error:
        return None, f"{doing}: {error.strerror or error}"
    return ahead, None


def _write(file: Path) -> None:
    with file.open("wb") as out:
        out.write(bytes(_WRITTEN))
        out.flush()
        os.fsync(out.fileno())
