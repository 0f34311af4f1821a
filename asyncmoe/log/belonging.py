"""Which run a log is of: RUN/log.json has its random name, what it belongs to, and moves with the run."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Final, Literal

import msgspec

from asyncmoe import storage
from asyncmoe.errors import ConfigError, DataError

MARKER, FOLDER = "log.json", "log"
FORM: Final = 2
"""Of all records: whoever changes one raises it."""
_FORMER = ("journal.json", "journal")
_AGAIN = "what was queued or under way is then sampled again"


class Belonging(msgspec.Struct, frozen=True):
    """The run of a log.

    Attributes:
        form: `FORM`.
        of: what else the log belongs to, in the user's terms: {"run.seed": "3"}.
        redis: whether it is kept in Redis.
        begun: groups were begun: the run has something to go on with.
        folder: `log.folder`, if it is set.
        run: random name, which is in every segment or key.
    """

    form: Literal[2]
    of: dict[str, str]
    redis: bool = False
    begun: bool = False
    folder: str = ""
    run: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)

    def where(self, run_dir: Path) -> Path:
        """Return the folder of a log that is not in Redis."""
        return Path(self.folder) if self.folder else run_dir / FOLDER


def read(run_dir: Path) -> Belonging | None:
    """Return what a run's log belongs to; None: it has none. Raises DataError: it is damaged, or of another form."""
    if former := [run_dir / name for name in _FORMER if (run_dir / name).exists()]:
        hint = f"finish the run with the version that began it, or delete {' and '.join(map(str, former))}: {_AGAIN}"
        raise DataError("run.dir", got=f"{run_dir} with a journal, the form before", expected="a log", hint=hint)
    try:
        return msgspec.json.decode((run_dir / MARKER).read_bytes(), type=Belonging)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        hint = f"use the version that wrote it, or delete it and the log: {_AGAIN}"
        raise DataError(str(run_dir / MARKER), got=str(error), expected="the name of the run's log", hint=hint) from error


def write(run_dir: Path, now: Belonging) -> None:
    """Note what a run's log belongs to. Raises StorageError."""
    with storage.writing("the name of the run's log", run_dir / MARKER):
        storage.make_private(run_dir)
        storage.replace(run_dir / MARKER, msgspec.json.encode(now), durable=True)


def check(known: Belonging, now: Belonging, run_dir: Path) -> None:
    """Refuse a configuration that the log of a run, which has begun, does not belong to. A log that is deleted belongs to anything.

    Raises:
        ConfigError: the log is in Redis and not in a folder, or the other way round, or in another folder.
        DataError: it belongs to something else.
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
    """Whether a run has a log with groups in it, so that its records must stay. Raises as `read`."""
    return (known := read(run_dir)) is not None and known.begun
