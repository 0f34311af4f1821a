"""What processes hold, as the kernel counts it, and what is in folders."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SHARED = "/dev/shm/"


@dataclass(frozen=True)
class Held:
    """What one process holds at one moment.

    Attributes:
        rss, pss: resident bytes; pss counts a page that n processes share as 1/n.
        anonymous: resident bytes that belong to no file: heap and stacks.
        threads, descriptors: their numbers.
    """

    rss: int
    pss: int
    anonymous: int
    threads: int
    descriptors: int


def held(pid: int) -> Held:
    """Return what a process holds (proc(5): smaps_rollup, task, fd).

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process any more.
    """
    folder = _PROC / str(pid)
    lines = (line.split() for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
    kib = {words[0]: int(words[1]) for words in lines}
    threads, descriptors = len(os.listdir(folder / "task")), len(os.listdir(folder / "fd"))
    return Held(kib["Rss:"] << 10, kib["Pss:"] << 10, kib["Anonymous:"] << 10, threads, descriptors)


def shared_files(pid: int) -> set[str]:
    """Return the paths below /dev/shm that a process has mapped.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process any more.
    """
    lines = (_PROC / str(pid) / "maps").read_text().splitlines()
    return {path for line in lines if (path := line[line.find(_SHARED) :]).startswith(_SHARED) and not path.endswith(" (deleted)")}


def size(paths: Iterable[str]) -> int:
    """Bytes of the files that are still there."""
    total = 0
    for path in paths:
        try:
            total += os.stat(path, follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
    return total


def below(folder: Path) -> list[str]:
    """Paths of all files below a folder; of none if it is not there."""
    return [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]
