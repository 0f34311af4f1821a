"""Which processes live, by what they inherited."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

MARK = "ASYNCMOE_ENGINE_TEST"


def in_session(leader: int) -> list[int]:
    """Living processes of the session that `leader` opened."""
    return [pid for pid in _processes() if _session(pid) == leader]


def marked(mark: str) -> list[int]:
    """Living processes that inherited `MARK`=mark."""
    return [pid for pid in _processes() if f"{MARK}={mark}\0".encode() in _read(pid, "environ")]


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def command_of(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) != os.getpid()]


def _session(pid: int) -> int | None:
    # The name, in parentheses, may hold anything; after it: state, parent, group, session.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[3]) if fields and fields[0] != b"Z" else None


def _read(pid: int, name: str) -> bytes:
    try:
        return (Path("/proc") / str(pid) / name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
