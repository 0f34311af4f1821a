"""Which run a journal belongs to: RUN/journal.json names it, wherever its folder is, and moves with the run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncmoe import storage
from asyncmoe.errors import ConfigError, DataError
from asyncmoe.journal import rows
from asyncmoe.journal.states import States
from asyncmoe.journal.states_file import FILE

MARKER = "journal.json"


@dataclass
class Belonging:
    """The run of a journal.

    Attributes:
        run_dir: directory of the run.
        of: what else the journal belongs to, in the user's terms: {"run.seed": "3"}.
        run: the random name that the run's marker gives the journal.
        begun: groups were begun since the marker was made: the run has something to go on with.
        redis: whether the journal is kept in Redis.
        told: what the marker says that it belongs to and whether it is in Redis; empty: there is none, or an earlier version wrote it.
    """

    run_dir: Path
    of: Mapping[str, str]
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    begun: bool = False
    redis: bool = False
    noted: bool = False
    told: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_run(cls, run_dir: Path, of: Mapping[str, str], *, redis: bool = False) -> Belonging:
        """Read the marker of a run; without one, choose a name.

        Raises:
            DataError: it is damaged.
        """
        path = run_dir / MARKER
        try:
            told = json.loads(path.read_text())
            more = {"of": dict(told["of"]), "redis": bool(told["redis"])} if "of" in told else {}
            return cls(run_dir, of, str(told["journal"]), bool(told["begun"]), redis, True, more)
        except FileNotFoundError:
            return cls(run_dir, of, redis=redis)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                str(path), got=str(error), expected="the name of the run's journal", hint="delete it and the journal"
            ) from error

    def check(self, key: str, folder: Path) -> None:
        """Refuse a configuration that the run's journal does not belong to; the journal itself is not opened.

        Args:
            key: of the configuration, which names its place.
            folder: where it is, if it is in a folder.

        Raises:
            ConfigError: it is in Redis and not in a folder, or the other way round.
            DataError: it belongs to something else.
        """
        if not self.begun or not self.told:
            return
        if self.told["redis"] != self.redis:
            places = {True: "the journal in Redis, as before", False: f"the journal in {folder}, as before"}
            hint = f"set journal.redis back, or delete {self.run_dir / MARKER}: what was queued or under way is then sampled again"
            got = "a server, and the run's journal is in a folder" if self.redis else "null, and the run's journal is in a Redis server"
            raise ConfigError("journal.redis", got=got, expected=places[self.told["redis"]], hint=hint)
        if self.redis or (folder / FILE).exists():
            where = "journal of the run" if self.redis else f"journal {folder}"
            rows.check_identity(self.told["of"], self.of, where, key, f"delete {self.run_dir / MARKER} and {where}")

    @property
    def identity(self) -> Mapping[str, str]:
        """What the journal's file must say."""
        return {"run": self.run, **self.of}

    @property
    def digest(self) -> str:
        """A short form of the identity, for the segments."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def note(self, *, begun: bool = False) -> None:
        """Write the marker, unless it says so already.

        Raises:
            StorageError: it cannot be written.
        """
        now = {"of": dict(self.of), "redis": self.redis}
        if self.noted and self.begun >= begun and self.told == now:
            return
        self.noted, self.begun, self.told = True, self.begun or begun, now
        path = self.run_dir / MARKER
        with storage.writing("the name of the run's journal", path):
            temporary = path.with_suffix(".tmp")
            with temporary.open("w") as file:
                json.dump({"journal": self.run, "begun": self.begun, **now}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)

    def clear_if_empty(self, folder: Path, *payloads: Path) -> None:
        """Delete a blank journal (`rows.is_blank`), which may belong to anything. Raises as `States.open`.

        Args:
            payloads: its folders of segments.
        """
        if not (folder / FILE).exists():
            return
        states = States.open(folder, {})
        try:
            blank = states.read(lambda connection: rows.is_blank(connection, self.identity))
        finally:
            states.close()
        if blank:
            with storage.writing("the journal", folder):
                for path in folder.glob(f"{FILE}*"):
                    path.unlink()
                for segments in payloads:
                    if segments.is_dir():
                        shutil.rmtree(segments)


def refuse_without(run_dir: Path, folder: Path) -> None:
    """Refuse to go on without the journal that a run has: its groups would be trained again. Raises ConfigError."""
    if has_begun(run_dir):
        hint = f"or delete {run_dir / MARKER} and {folder}: what was queued or under way is then sampled again"
        raise ConfigError("journal.enabled", got="false", expected="true, because the run has a journal", hint=hint)


def has_begun(run_dir: Path) -> bool:
    """Whether a run has a journal with groups in it, so that its records must stay. Raises DataError if the marker is damaged."""
    return Belonging.of_run(run_dir, {}).begun
