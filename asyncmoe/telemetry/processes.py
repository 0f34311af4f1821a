"""The processes of a run: each process started by a launcher writes run.dir/processes/ROLE.json; its children are found through it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from asyncmoe.process import boot_id
from asyncmoe.storage import make_private, replace, writing
from asyncmoe.telemetry.heartbeats import path_of
from asyncmoe.telemetry.records import decoded

FOLDER = "processes"


class Recorded(msgspec.Struct, frozen=True):
    """A process of a run. Pid, boot and start time identify a process uniquely; a pid alone does not, as it may be reused."""

    role: str
    """Its name in the run: "supervisor", "trainer.3"."""
    host: str
    boot: str
    """The kernel's id of the host's present boot."""
    pid: int
    started: int
    """Clock ticks from boot to the start of the process: field 22 of /proc/PID/stat (proc(5))."""
    directory: int = 0
    """Inode of the run's directory on this host, which differs in a copy; 0: not recorded."""


def record(run_dir: Path, role: str) -> None:
    """Record this process; replaces an earlier process of the same role.

    Raises:
        StorageError: the file cannot be written.
    """
    path = path_of(run_dir, role, FOLDER)
    with writing("processes of the run", path):
        make_private(run_dir)
        path.parent.mkdir(exist_ok=True)
        this = Recorded(role, socket.gethostname(), boot_id(), os.getpid(), started(os.getpid()) or 0, run_dir.stat().st_ino)
        replace(path, msgspec.json.encode(this) + b"\n")


def read(run_dir: Path) -> list[Recorded]:
    """Return the recorded processes of a run, by role. In a copy of a run's directory, processes of this host are left out: they belong to
    the original run.

    Raises:
        DataError: a file is damaged.
    """
    files = sorted((run_dir / FOLDER).glob("*.json"))
    found = [decoded(str(path), path.read_bytes(), Recorded, "a recorded process", "delete it") for path in files]
    return [one for one in found if not is_here(one) or one.directory in (0, run_dir.stat().st_ino)]


def is_here(process: Recorded) -> bool:
    """True if the process was started on this host since its last boot."""
    return (process.host, process.boot) == (socket.gethostname(), boot_id())


def runs(process: Recorded) -> bool:
    """True if the process, which must be on this host, is still running."""
    return is_here(process) and started(process.pid) == process.started


def started(pid: int) -> int | None:
    """Return when a process of this host started, in clock ticks since boot; None if there is no such process, or if it has ended (a
    zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before ")" may hold blanks
    return None if fields[0] == "Z" else int(fields[19])
