"""Watch a run from its supervisor: heartbeats, stacks of hanging processes, and alerts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, DataError, Interrupted
from asyncmoe.launch import stacks
from asyncmoe.launch.rule import CONTROLLER, TRAINER
from asyncmoe.storage import writing
from asyncmoe.telemetry import heartbeats
from asyncmoe.telemetry.alerts import Alarm, Alert, Event, Told, tell
from asyncmoe.telemetry.heartbeats import Beat, BeatListener, Silence
from asyncmoe.telemetry.records import Followed
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.starting import phases

_KEPT = 20


class Watcher:
    """Watches a run whose live view feeds it several times a second. Use it as a context manager around the run.

    Attributes:
        say: shows a message to the user; may be called from another thread.
    """

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._watch, self._clock = config, config.watch, clock
        self.say: Callable[[str], None] = partial(print, file=sys.stderr, flush=True)
        self._alarm = Alarm(config.watch.alerts.command, config.run.dir.name, lambda text: self.say(text))
        self._told, self._listener, self._next = Told(), BeatListener(), 0.0
        self._began, self._beats, self._rollouts, self._reached = clock(), dict[str, Beat](), list[Rollout](), set[str]()
        self._silences: list[Silence] = []
        self._dumped: dict[str, Path] = {}
        self._folder: int | None = None

    def __enter__(self) -> Watcher:
        self._folder = _inode(self._config.run.dir)
        heartbeats.forget(self._config.run.dir)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        named = self.named(error) if isinstance(error, AsyncmoeError) and not isinstance(error, Interrupted) else error
        if isinstance(named, Exception) and not isinstance(named, Interrupted):
            self.alert("failed", f"the run has failed: {named}")
        self._alarm.close()
        if named is not error and named is not None:
            raise named from error

    def feed(self, records: list[Followed]) -> None:
        """Consume new records, and check the heartbeats of every process.

        Raises:
            DataError: run.dir has been moved or deleted; its processes' further output would be split between two places.
        """
        now = self._clock()
        if _inode(self._config.run.dir) != self._folder:
            what, hint = f"run.dir {self._config.run.dir}", "put it back and run the same command, or name its new place in run.dir"
            raise DataError(what, got="moved or deleted while the run went on", expected="the folder in which the run started", hint=hint)
        self._say_phases(records, now)
        self._told, alerts = tell(self._told, records, now)
        for alert in alerts:
            if alert.event in ("engine_lost", "worker_lost"):
                self.say(alert.text)
            self._alarm.send(alert)
        if now >= self._next:
            self._next = now + self._watch.beat_s
            self._listen(now)

    def _listen(self, now: float) -> None:
        self._beats = heartbeats.read(self._config.run.dir)
        self._silences = self._listener.hear(self._beats, now)
        silent = [one for one in self._silences if one.seconds > self._watch.stacks_after_s]
        self._dumped = {role: path for role, path in self._dumped.items() if any(one.role == role for one in silent)}
        if new := [one for one in silent if one.role not in self._dumped]:
            path = write_stacks(self._config.run.dir, new)
            self._dumped |= {one.role: path for one in new}
            text = f"{new[0]}{f', and {len(new) - 1} more' if new[1:] else ''}; stacks of every process: {path}"
            self.say(text)
            self.alert("silent", text)

    def _say_phases(self, records: list[Followed], now: float) -> None:
        """Say, until the first step after the warm-up, what the run has newly reached."""
        self._rollouts = [*self._rollouts[:1], *(one for one in records if isinstance(one, Rollout))]
        reached = [one for one in phases(self._beats.values(), self._rollouts) if one not in self._reached]
        self._reached.update(reached)
        if reached and self._told.step <= self._config.warmup.steps:
            self.say(f"{', '.join(reached)}, {now - self._began:.0f} s after the start")

    @property
    def hanging(self) -> str | None:
        """The indispensable part with a process that has been silent for watch.end_after_s: the controller if it is silent, else the
        trainer; None without one."""
        limit = self._watch.end_after_s
        if limit is None or not any(one.seconds > limit and heartbeats.ends_the_run(one.role) for one in self._silences):
            return None
        return CONTROLLER if CONTROLLER in self._dumped else TRAINER

    def alert(self, event: Event, text: str) -> None:
        """Send an alert about the current step."""
        self._alarm.send(Alert(event, text, self._told.step))

    def forget(self, roles: str) -> None:
        """Forget ended processes whose roles begin with `roles`, until the next start's heartbeats."""
        heartbeats.forget(self._config.run.dir, roles)
        self._listener.forget(roles)
        self._silences = [one for one in self._silences if not one.role.startswith(roles)]
        self._dumped = {role: path for role, path in self._dumped.items() if not role.startswith(roles)}

    def named(self, error: AsyncmoeError) -> AsyncmoeError:
        """Return an error that names the process that was silent longest, if any, because its silence makes others fail."""
        first = next((one for one in self._silences if one.role in self._dumped), None)
        if first is None:
            return error
        told = f"{first}; stacks of every process are in {self._dumped[first.role]}; then: {error}"
        return AsyncmoeError(told, exit_code=error.exit_code)


def _inode(folder: Path) -> int | None:
    """Return the number of a folder on its file system; None if there is none."""
    try:
        return folder.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_stacks(run_dir: Path, silent: list[Silence]) -> Path:
    """Write the stacks of every process of a run on this host to a new file in run.dir/logs, with the reason for it; return the file.
    Only the newest such files are kept.

    Raises:
        StorageError: the file cannot be written.
    """
    path = run_dir / "logs" / f"stacks-{datetime.now(UTC):%Y%m%dT%H%M%S}.txt"
    with writing("stacks of the run", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in sorted(path.parent.glob("stacks-*.txt"))[: -(_KEPT - 1)]:
            old.unlink(missing_ok=True)
        with path.open("a") as file:
            print(*silent, sep="\n", file=file, flush=True)
            try:
                for paragraph in stacks.stacks(run_dir):
                    print(paragraph, file=file, flush=True)
            except AsyncmoeError as error:  # no process runs any more
                print(error, file=file)
    return path
