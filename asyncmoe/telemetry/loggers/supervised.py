"""A logger's process as the live view starts, watches and ends it."""

from __future__ import annotations

import sys
import time
from signal import Signals

import msgspec

from asyncmoe.config import Config
from asyncmoe.process import Child
from asyncmoe.telemetry.loggers import state

_LOOK_S = 1.0
DOWN_S = 5.0
"""Seconds for the last attempt of a logger that does not answer, and of every logger if the run failed."""


class LoggerProcess:
    """Starts the process that sends the records of a run to a logger. Nothing here waits for the logger, except `end`.

    Raises:
        DataError: the logger's state is damaged.
        StorageError: its log or its state cannot be written.
    """

    def __init__(self, config: Config, name: str) -> None:
        self.name, self._run_dir = name, config.run.dir
        before = state.read(self._run_dir, name)
        if before.problem is not None:
            state.write(self._run_dir, name, msgspec.structs.replace(before, problem=None))
        command = [sys.executable, "-m", "asyncmoe.telemetry.loggers", str(self._run_dir), name]
        self._child = Child(f"logger {name}", command, self._run_dir / "logs" / f"logger-{name}.log")
        self._told = False
        self._next = 0.0

    def look(self) -> str | None:
        """Return what to tell the user: once in a run, that the logger gets nothing for now."""
        now = time.monotonic()
        if self._told or now < self._next:
            return None
        self._next = now + _LOOK_S
        if (problem := self._problem()) is None:
            return None
        self._told = True
        if self._child.returncode is not None:
            return f"{problem}; the run goes on without it. Afterwards send what is missing: asyncmoe resend {self._run_dir}"
        return f"{problem}; the run goes on, and what is missing is sent once it can be"

    def ask_to_end(self) -> None:
        """Let the process send the rest and end."""
        self._child.signal(Signals.SIGTERM)

    def end(self, until: float) -> str | None:
        """Wait for the end of the process, and end it.

        Args:
            until: time.monotonic's seconds to wait for it; a logger that does not answer is given `DOWN_S`.

        Returns:
            What to tell the user: that something was not sent.
        """
        if state.read(self._run_dir, self.name).problem is not None:
            until = min(until, time.monotonic() + DOWN_S)
        late = not self._child.wait(max(0.0, until - time.monotonic()))
        if late:
            self._child.end(0)
        found = state.read(self._run_dir, self.name)
        if found.problem is None and self._child.returncode != 0:
            late_words = f"{self.name}: not everything was delivered in time (telemetry.loggers.finish_timeout_s)"
            found = msgspec.structs.replace(found, problem=late_words if late else f"{self.name}: {self._child.why()}")
            state.write(self._run_dir, self.name, found)
        if found.problem is None:
            return None
        later = f", then: {found.later}" if found.later else ""
        return f"{found.problem}; to send what is missing: asyncmoe resend {self._run_dir}{later}"

    def _problem(self) -> str | None:
        found = state.read(self._run_dir, self.name).problem
        if found is None and self._child.returncode not in (None, 0):
            return f"{self.name}: {self._child.why()}"
        return found
