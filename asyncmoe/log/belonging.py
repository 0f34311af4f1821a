"""The run that a log belongs to: RUN/log.json has the log's random name and its settings, and moves with the run."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Final, Literal

import msgspec

from asyncmoe import storage
from asyncmoe.errors import ConfigError, DataError

MARKER, FOLDER = "log.json", "log"
FORM: Final = 4
"""Version of all record formats: raise it when one changes."""
_AGAIN = "queued and unfinished episodes are then sampled again"


class Belonging(msgspec.Struct, frozen=True):
    """What a run's log belongs to.

    Attributes:
        form: `FORM`.
        of: settings that the log depends on, in the user's terms: {"run.seed": "3"}.
        redis: whether the log is in Redis.
        begun: whether any group was begun, so that the run has something to resume.
        folder: `log.folder`, if it is set.
        run: random name, contained in every segment or key.
    """

    form: Literal[4]
    of: dict[str, str]
    redis: bool = False
    begun: bool = False
    folder: str = ""
    run: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)

    def where(self, run_dir: Path) -> Path:
        """Return the folder of a log in files."""
        return Path(self.folder) if self.folder else run_dir / FOLDER


def read(run_dir: Path) -> Belonging | None:
    """Return what a run's log belongs to, or None if it has none. Raises DataError if the file is damaged or of another form."""
    try:
        return msgspec.json.decode((run_dir / MARKER).read_bytes(), type=Belonging)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        hint = f"use the version that wrote it, or delete it and the log: {_AGAIN}"
        raise DataError(str(run_dir / MARKER), got=str(error), expected="the name of the run's log", hint=hint) from error


def write(run_dir: Path, now: Belonging) -> None:
    """Record what a run's log belongs to. Raises StorageError."""
    with storage.writing("the name of the run's log", run_dir / MARKER):
        storage.make_private(run_dir)
        storage.replace(run_dir / MARKER, msgspec.json.encode(now), durable=True)


def check(known: Belonging, now: Belonging, run_dir: Path) -> None:
    """Refuse a configuration that does not match the log of a run that has begun. A deleted log matches any configuration.

    Raises:
        ConfigError: the log is not in the place that the configuration names (Redis or a folder).
        DataError: a setting on which the log depends has changed.
    """
    former, place = known.where(run_dir), now.where(run_dir)
    if known.redis != now.redis or (former != place and former.exists() and not place.exists()):
        got, expected = ("a Redis server" if one.redis else f"the folder {one.where(run_dir)}" for one in (now, known))
        hint = f"set it back, move the log, or delete {run_dir / MARKER}: {_AGAIN}"
        key = "log.folder" if known.redis == now.redis else "log.redis"
        raise ConfigError(key, got=got, expected=f"{expected}, where the run's log is", hint=hint)
    log = "the log of the run" if known.redis else f"log {place}"
    for name, value in now.of.items() if known.redis or place.exists() else ():
        if known.of.get(name) != value:
            hint = f"set it back, or delete {run_dir / MARKER} and {log}: {_AGAIN}"
            raise DataError(name, got=value, expected=f"{known.of.get(name)}, as {log} has it", hint=hint)


def has_begun(run_dir: Path) -> bool:
    """Return whether a run has a log with groups in it, so that its records must stay. Raises as `read`."""
    return (known := read(run_dir)) is not None and known.begun
