"""Which run a log is of: RUN/log.json has its random name, what it belongs to, and moves with the run."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncmoe import storage
from asyncmoe.errors import ConfigError, DataError

MARKER, FOLDER = "log.json", "log"
_FORMER = ("journal.json", "journal")
_AGAIN = "what was queued or under way is then sampled again"


class Belonging(msgspec.Struct, frozen=True):
    """The run of a log.

    Attributes:
        run: random name, which is in every segment or key.
        of: what else the log belongs to, in the user's terms: {"run.seed": "3"}.
        redis: whether it is kept in Redis.
        begun: groups were begun: the run has something to go on with.
        folder: `log.folder`, if it is set.
    """

    run: str
    of: dict[str, str]
    redis: bool = False
    begun: bool = False
    folder: str = ""


def new(of: Mapping[str, str], *, redis: bool = False, folder: str = "") -> Belonging:
    """Return what a run's first log belongs to."""
    return Belonging(uuid.uuid4().hex, dict(of), redis, folder=folder)


def read(run_dir: Path) -> Belonging | None:
    """Return what a run's log belongs to; None: it has none. Raises DataError: it is damaged, or of the form before."""
    if former := [run_dir / name for name in _FORMER if (run_dir / name).exists()]:
        hint = f"finish the run with the version that began it, or delete {' and '.join(map(str, former))}: {_AGAIN}"
        raise DataError("run.dir", got=f"{run_dir} with a journal, the form before", expected="a log", hint=hint)
    try:
        return msgspec.json.decode((run_dir / MARKER).read_bytes(), type=Belonging)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        hint = f"delete it and the log: {_AGAIN}"
        raise DataError(str(run_dir / MARKER), got=str(error), expected="the name of the run's log", hint=hint) from error


def write(run_dir: Path, now: Belonging) -> None:
    """Note what a run's log belongs to. Raises StorageError."""
    with storage.writing("the name of the run's log", run_dir / MARKER):
        storage.make_private(run_dir)
        part = run_dir / f".{MARKER}"
        with part.open("wb") as file:
            file.write(msgspec.json.encode(now))
            file.flush()
            os.fsync(file.fileno())
        part.replace(run_dir / MARKER)


def check(known: Belonging, now: Belonging, run_dir: Path, place: Path) -> None:
    """Refuse a configuration that the log of a run, which has begun, does not belong to.

    Args:
        place: folder of the log. One that is deleted belongs to anything.

    Raises:
        ConfigError: the log is in Redis and not in a folder, or the other way round, or in another folder.
        DataError: it belongs to something else.
    """
    if known.redis != now.redis:
        places = {True: "a Redis server", False: f"the folder {place}"}
        hint = f"set it back, or delete {run_dir / MARKER}: {_AGAIN}"
        raise ConfigError("log.redis", got=places[now.redis], expected=f"{places[known.redis]}, where the run's log is", hint=hint)
    former = Path(known.folder) if known.folder else run_dir / FOLDER
    if known.folder != now.folder and former.exists() and not place.exists():
        hint = f"set it back, move the log, or delete {run_dir / MARKER}: {_AGAIN}"
        raise ConfigError("log.folder", got=place, expected=f"{former}, where the run's log is", hint=hint)
    where = "the log of the run" if known.redis else f"log {place}"
    for name, value in now.of.items() if known.redis or place.exists() else ():
        if known.of.get(name) != value:
            hint = f"set it back, or delete {run_dir / MARKER} and {where}: {_AGAIN}"
            raise DataError(name, got=value, expected=f"{known.of.get(name)}, as {where} has it", hint=hint)


def has_begun(run_dir: Path) -> bool:
    """Whether a run has a log with groups in it, so that its records must stay. Raises as `read`."""
    return (known := read(run_dir)) is not None and known.begun
