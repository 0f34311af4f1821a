"""What a logger has been sent: run.dir/loggers/NAME.json, written by the logger's process."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import msgspec

from asyncmoe.errors import DataError, UserError
from asyncmoe.storage import lock_alone, replace, writing
from asyncmoe.telemetry.loggers.points import Sent

FOLDER = "loggers"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """State of a logger."""

    id: str | None = None
    """Id of the logger's run; None before it exists."""
    url: str = ""
    """Address of the logger's run for people; "" without one."""
    target: str = ""
    """Where the run is; see `Backend.target`."""
    later: str = ""
    """See `Backend.later`."""
    sent: Sent = Sent()
    sampled: int = 0
    """Last step whose samples were sent."""
    problem: str | None = None
    """Why the logger does not get what is recorded, in one line; None if it does."""


def folder(run_dir: Path) -> Path:
    """Return the folder of all loggers' files."""
    return run_dir / FOLDER


def read(run_dir: Path, name: str) -> State:
    """Return the state of a logger; the empty state before its first.

    Raises:
        DataError: the file is damaged.
    """
    path = folder(run_dir) / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return State()
    except msgspec.DecodeError as error:
        raise DataError(str(path), got=str(error), expected="a logger's state", hint="delete it: a new run begins there") from error


def write(run_dir: Path, name: str, state: State) -> None:
    """Replace the state of a logger atomically.

    Raises:
        StorageError: it cannot be written.
    """
    path = folder(run_dir) / f"{name}.json"
    with writing(f"state of logger {name}", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, msgspec.json.encode(state) + b"\n")


def claim(run_dir: Path, name: str) -> IO[str]:
    """Lock a logger of a run until the returned file is closed.

    Raises:
        UserError: another process sends to it.
    """
    path = folder(run_dir) / f".{name}.lock"
    with writing(f"state of logger {name}", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    if not lock_alone(lock):
        raise UserError(f"logger {name}", got=f"{run_dir}, which another process sends", expected="one sender; try again later")
    return lock


def known(run_dir: Path) -> list[str]:
    """Return the names of the loggers that have a state."""
    return sorted(path.stem for path in folder(run_dir).glob("*.json"))
