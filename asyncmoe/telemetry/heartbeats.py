"""Heartbeats: each process of a run writes to run.dir/heartbeats/ROLE.json that it makes progress, and what it is doing.

A heartbeat comes from the code that does the work, not from a separate thread: a process whose work hangs is silent. The reader measures
silence with its own clock, from the last change of a file, so clocks of several hosts do not matter.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncmoe.storage import replace

FOLDER = "heartbeats"
DUMP_SIGNAL = signal.SIGUSR2
"""A process whose `Beat.dumps` is true writes its stacks to `stacks_file` on this signal."""
TRAINER = "trainer."
"""Beginning of the roles of trainer ranks."""
SERVES = "looks after its server"
"""`Beat.does` of an engine whose server answers."""
ENDED = "ended"
"""`Beat.does` of a process that has ended successfully, and is expected to be silent."""


class Beat(msgspec.Struct, frozen=True):
    """A heartbeat. `number` counts the process's heartbeats; `does` describes what the process now begins."""

    role: str
    pid: int
    number: int
    does: str
    dumps: bool = False


class Heart:
    """Writes this process's heartbeats.

    Args:
        every_s: minimum seconds between two heartbeats, except for the first and the last.
    """

    def __init__(self, run_dir: Path, role: str, every_s: float) -> None:
        self._path, self._role, self._every_s = path_of(run_dir, role), role, every_s
        self._next, self._number, self._dumps = float("-inf"), 0, False

    def hears_signals(self, file: Path) -> None:
        """Write this process's stacks to `file` at each `DUMP_SIGNAL`, even while it hangs in native code."""
        with suppress(OSError):  # on failure, `asyncmoe stacks` shows only the process's state
            file.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = file.open("a")
            faulthandler.register(DUMP_SIGNAL, self._stacks, all_threads=True, chain=False)
            self._dumps = True

    def beat(self, does: str) -> None:
        """Report progress, and what begins now."""
        now = time.monotonic()
        if now < self._next and does != ENDED:
            return
        self._next, self._number = now + self._every_s, self._number + 1
        # Writers of records report a failing disk. A heartbeat must not end a healthy run, nor recreate the run's folder after a move.
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            replace(self._path, msgspec.json.encode(Beat(self._role, os.getpid(), self._number, does, self._dumps)))


_HEARTS: list[Heart] = []


def start(run_dir: Path, role: str, every_s: float) -> None:
    """Make this process `role` of a run. The process is watched only from its first `beat` on, because starting may be slow."""
    heart = Heart(run_dir, role, every_s)
    heart.hears_signals(stacks_file(run_dir, role))
    _HEARTS[:] = [heart]


def beat(does: str) -> None:
    """Write a heartbeat of this process, unless the last one is recent; do nothing without a prior `start`."""
    for heart in _HEARTS:
        heart.beat(does)


def path_of(run_dir: Path, role: str, folder: str = FOLDER) -> Path:
    """Return a role's file in a folder of a run; by default that of its heartbeats."""
    return run_dir / folder / f"{re.sub(r'[^0-9A-Za-z._-]', '_', role)}.json"


def stacks_file(run_dir: Path, role: str) -> Path:
    """Return the file to which a process writes its own stacks."""
    return run_dir / "logs" / "stacks" / f"{path_of(run_dir, role).stem}.txt"


def read(run_dir: Path) -> dict[str, Beat]:
    """Return the newest heartbeat of each role; unreadable files are left out, as if they had not been written yet."""
    found = {}
    for path in (run_dir / FOLDER).glob("*.json"):
        with suppress(OSError, ValueError):
            one = msgspec.json.decode(path.read_bytes(), type=Beat)
            found[one.role] = one
    return found


def forget(run_dir: Path, roles: str = "") -> None:
    """Delete heartbeats that an earlier start left, of the roles that begin with `roles`."""
    for path in (run_dir / FOLDER).glob(f"{roles}*"):
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Silence:
    """A process that should make progress: how long it has been silent, and what it began last."""

    role: str
    seconds: float
    does: str

    def __str__(self) -> str:
        return f"{self.role} has been silent for {self.seconds:.0f} s, since it began: {self.does}"


class BeatListener:
    """Measures the silence of each role from its latest heartbeat."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[Beat, float]] = {}

    def hear(self, beats: Mapping[str, Beat], now: float) -> list[Silence]:
        """Take the newest heartbeats and return the silence of each role, longest first. `now`: seconds on any steady clock."""
        for role, one in beats.items():
            if role not in self._heard or self._heard[role][0] != one:
                self._heard[role] = (one, now)
        found = [Silence(role, now - since, one.does) for role, (one, since) in self._heard.items() if one.does != ENDED]
        return sorted(found, key=lambda one: -one.seconds)

    def forget(self, roles: str) -> None:
        """Measure the silence of roles that begin with `roles` only from their next heartbeat on."""
        self._heard = {role: heard for role, heard in self._heard.items() if not role.startswith(roles)}


def ends_the_run(role: str) -> bool:
    """Return whether a run cannot continue without this role. It can continue without an engine, which the controller fences."""
    return role == "controller" or role.startswith(TRAINER)
