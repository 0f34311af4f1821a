"""Send a run's records to a logger: `python -m asyncmoe.telemetry.loggers RUN NAME`, a process beside the run, and `asyncmoe resend RUN`.

The records are read from the start of their files, and what `State.sent` names is skipped. After any error of a logger's client the sender
starts over with a new client, later and later, so that a logger that was down gets what it missed, and no more.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, DataError, UserError
from asyncmoe.process import die_with_parent
from asyncmoe.telemetry.follow import Follower
from asyncmoe.telemetry.loggers import checks, state, tables
from asyncmoe.telemetry.loggers.backend import Backend
from asyncmoe.telemetry.loggers.parameters import parameters
from asyncmoe.telemetry.loggers.points import Points, Sent, batches

T = TypeVar("T")
log = logging.getLogger(__name__)
_POLL_S = 1.0
_TABLES_S = 300.0
"""Seconds between two tables of samples: each is a file of the logger."""
_FIRST_RETRY_S, _LAST_RETRY_S = 5.0, 300.0
_CLAIM_S = 60.0
_NICE = 10
_MOST_PROBLEM = 300
"""Longest problem to keep, in characters."""


class LoggerFailed(AsyncmoeError):
    """A logger's client failed."""


class RecordSender:
    """Sends the records of one run to one logger.

    Args:
        make: makes a new client.
        stop: set when no more records will come.
        retry_s: seconds before the first new attempt; doubles with each, up to five minutes.
    """

    def __init__(
        self, config: Config, name: str, make: Callable[[], Backend], stop: threading.Event, retry_s: float = _FIRST_RETRY_S
    ) -> None:
        self._config, self._name, self._make, self._stop, self._retry_s = config, name, make, stop, retry_s
        self._state = state.read(config.run.dir, name)
        self._next_tables = time.monotonic() + _TABLES_S

    def run(self) -> None:
        """Send until `stop` is set and everything is sent. Once `stop` is set, the first failure ends it.

        Raises:
            LoggerFailed: the logger failed, and no more attempts are made.
            DataError: a record is malformed.
            StorageError: the state cannot be written.
        """
        wait = self._retry_s
        while True:
            before = self._state.sent
            last = self._stop.is_set()
            try:
                return self._session()
            except LoggerFailed as error:
                self._note(problem=str(error))
                if last:
                    raise
            if self._state.sent != before:
                wait = self._retry_s
            self._stop.wait(wait)
            wait = min(2 * wait, _LAST_RETRY_S)

    def _session(self) -> None:
        """Send with one client until `stop` is set."""
        backend = self._make()
        if self._state.target != backend.target:  # another server or project than at the last start
            self._state = state.State(target=backend.target)
        ours = parameters(self._config)
        opened = _call(self._name, lambda: backend.open(self._state.id, self._state.sent.points, ours))
        self._note(id=opened.id, url=opened.url, later=backend.later, problem=None)
        follower, points = Follower(self._config.run.dir), Points(self._state.sent)
        while True:
            stopped = self._stop.is_set()  # before the records are read, so that the last ones are
            for batch in batches(points.take(follower.poll()), backend.most):
                trouble = _call(self._name, partial(backend.log, batch))
                self._note(sent=reduce(Sent.plus, batch, self._state.sent), problem=self._named(trouble))
            if stopped or time.monotonic() > self._next_tables:
                self._next_tables = time.monotonic() + _TABLES_S
                self._send_samples(backend)
            if stopped:
                break
            self._stop.wait(_POLL_S)
        total = self._config.warmup.steps + self._config.run.steps
        self._note(problem=self._named(_call(self._name, lambda: backend.close(self._state.sent.step >= total))))

    def _send_samples(self, backend: Backend) -> None:
        """Send the samples of the steps that were sent, if the user wants that."""
        sent, sampled = self._state.sent, self._state.sampled
        if not self._config.telemetry.loggers.samples or sent.step <= sampled:
            return
        try:
            for table in tables.tables(self._config.run.dir, sampled, sent.step):
                _call(self._name, partial(backend.table, "samples", table.step, tables.COLUMNS, table.rows))
                sent = msgspec.structs.replace(sent, points=sent.points + 1)
                self._note(sent=sent, sampled=table.step)
        except DataError as error:
            log.warning("%s: no samples: %s", self._name, error)

    def _named(self, trouble: str | None) -> str | None:
        return trouble and f"{self._name}: {trouble[:_MOST_PROBLEM]}"

    def _note(self, **changes: object) -> None:
        changed = msgspec.structs.replace(self._state, **changes)
        if changed != self._state:
            self._state = changed
            state.write(self._config.run.dir, self._name, changed)


def backend(config: Config, name: str) -> Backend:
    """Return a new client of a configured logger."""
    section, shown = config.telemetry, config.run.dir.resolve().name
    if name == "wandb" and section.wandb is not None:
        from asyncmoe.telemetry.loggers.wandb_backend import Wandb

        return Wandb(section.wandb, config.run.dir, shown)
    if name == "mlflow" and section.mlflow is not None:
        from asyncmoe.telemetry.loggers.mlflow_backend import Mlflow

        return Mlflow(section.mlflow, shown)
    if name == "trackio" and section.trackio is not None:
        from asyncmoe.telemetry.loggers.trackio_backend import Trackio

        return Trackio(section.trackio, shown)
    known = ", ".join(checks.configured(section)) or "none is configured: set telemetry.wandb, telemetry.mlflow or telemetry.trackio"
    raise UserError("logger", got=name, expected=f"one of the run's loggers ({known})")


def send(run_dir: Path, names: list[str]) -> dict[str, state.State]:
    """Send what the loggers of a run miss, all in turn, and return their states.

    Args:
        names: names of loggers; empty: all that the run's configuration has.

    Raises:
        UserError: the run has no such logger, its package is missing, or another process sends.
        LoggerFailed: a logger cannot be reached.
    """
    config = configuration.of_run(run_dir)
    wanted = names or checks.configured(config.telemetry)
    if not wanted:
        hint = f"write telemetry.wandb, telemetry.mlflow or telemetry.trackio into {run_dir / 'config.yaml'}"
        raise UserError("asyncmoe resend", got="a run without loggers", expected="one in its configuration", hint=hint)
    checks.check(config.telemetry)
    stop = threading.Event()
    stop.set()
    for name in wanted:
        backend(config, name)
    for name in wanted:
        with state.claim(run_dir, name):
            RecordSender(config, name, partial(backend, config, name), stop).run()
    return {name: state.read(run_dir, name) for name in wanted}


def follow(run_dir: Path, name: str, stop: threading.Event) -> None:
    """Send a run's records as they come, in a child of the supervisor, until `stop` is set and everything is sent."""
    die_with_parent()
    os.nice(_NICE)
    config = configuration.of_run(run_dir)
    with _claimed(run_dir, name, stop):
        RecordSender(config, name, partial(backend, config, name), stop).run()


def _claimed(run_dir: Path, name: str, stop: threading.Event) -> IO[str]:
    """Lock the logger. The sender of a supervisor that was killed may hold it for some more seconds."""
    until = time.monotonic() + _CLAIM_S
    while True:
        try:
            return state.claim(run_dir, name)
        except UserError:
            if time.monotonic() > until or stop.wait(_POLL_S):
                raise


def _call(name: str, act: Callable[[], T]) -> T:
    """Call a logger's client.

    Raises:
        LoggerFailed: it raised anything.
    """
    try:
        return act()
    except Exception as error:  # clients raise errors of all kinds; whatever it is, the user is told and the run goes on
        said = " ".join(str(error).split()) or type(error).__name__
        raise LoggerFailed(f"{name}: {said[:_MOST_PROBLEM]}") from error
