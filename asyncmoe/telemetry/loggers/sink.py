"""Pass the records of a run to a logger from a thread: a slow or failing logger delays nothing.

A record of what was sent is kept in run.dir/loggers, so that a restarted run continues the logger's run and sends what is missing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncmoe.config import Config
from asyncmoe.storage import replace, writing
from asyncmoe.telemetry.loggers.mlflow_client import Mlflow
from asyncmoe.telemetry.loggers.points import LoggedPoint, Points, Sent
from asyncmoe.telemetry.loggers.tensorboard_client import TensorBoard
from asyncmoe.telemetry.loggers.trackio_client import Trackio
from asyncmoe.telemetry.loggers.wandb_client import Wandb
from asyncmoe.telemetry.records import Followed, decoded
from asyncmoe.telemetry.versions import versions

FOLDER = "loggers"
FINISH_S = 30.0
"""Seconds to wait for a logger at the end of a run."""
_MOST_PROBLEM = 300
"""Maximum characters shown of a problem."""


class LoggerClient(Protocol):
    """A logger's client. Every method may raise any error of the logger's package."""

    def open(self, id: str | None, points: int, parameters: Mapping[str, Any]) -> tuple[str, str]:
        """Begin a run, or continue run `id`, to which `points` points were sent; return the run's id, and its address ("" if it has none).

        `parameters` is nested; its keys are strings.
        """

    def log(self, point: LoggedPoint) -> None:
        """Log a point."""

    def close(self, complete: bool) -> None:
        """Deliver everything and end the logger's run; `complete`: the trainer took all its steps."""


class LoggerState(msgspec.Struct, frozen=True, kw_only=True):
    """The id of the logger's run, None before it exists, and what was sent."""

    id: str | None = None
    sent: Sent = Sent()


class LoggerSink:
    """Feeds a logger, itself fed by the live view.

    Args:
        before: records of earlier starts of the run; the logger gets those it lacks.
        say: called from another thread with the address of the logger's run, and with the message of a failure.

    Raises:
        DataError: the logger's state is damaged.
    """

    def __init__(self, config: Config, name: str, client: LoggerClient, before: Sequence[Followed], say: Callable[[str], None]) -> None:
        self._config, self._name, self._client, self._say = config, name, client, say
        self._path = config.run.dir / FOLDER / f"{name}.json"
        self._state = read(self._path)
        self._points = Points()
        self._before = before
        self._waiting: queue.Queue[LoggedPoint | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)

    def feed(self, records: list[Followed]) -> None:
        """Queue new records; returns at once. The logger's run begins with the first point, when the user's scorer has already been
        tried."""
        before, self._before = self._before, ()
        for point in self._points.take([*before, *records]):
            self._waiting.put(point)
            if self._thread.ident is None:
                self._thread.start()

    def close(self) -> None:
        """Wait until everything is delivered, at most `FINISH_S`."""
        if self._thread.ident is None:
            return
        self._waiting.put(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            self._say(f"{self._name}: not everything was delivered within {FINISH_S:.0f} s; {self._missing}")

    @property
    def _missing(self) -> str:
        return f"it has the steps up to {self._state.sent.step}, and the next start of the run sends the rest"

    def _work(self) -> None:
        """Send until the run has ended."""
        parameters = {**self._config.model_dump(mode="json"), "versions": versions(self._config.engines.python)}
        try:
            id, url = self._client.open(self._state.id, self._state.sent.points, parameters)
            self._keep(LoggerState(id=id, sent=self._state.sent))
            if url:
                self._say(f"{self._name}: {url}")
            while (point := self._waiting.get()) is not None:
                if not self._state.sent.has(point):
                    self._client.log(point)
                    self._keep(LoggerState(id=id, sent=self._state.sent.plus(point)))
            self._client.close(self._state.sent.step >= self._config.warmup.steps + self._config.run.steps)
        except Exception as error:  # noqa: BLE001  clients raise errors of all kinds; the user is told, and the run goes on
            said = " ".join(str(error).split())[:_MOST_PROBLEM] or type(error).__name__
            self._say(f"{self._name}: {said}; the run goes on without it: {self._missing}")

    def _keep(self, state: LoggerState) -> None:
        self._state = state
        with writing(f"state of logger {self._name}", self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace(self._path, msgspec.json.encode(state) + b"\n")


def read(path: Path) -> LoggerState:
    """Return a logger's state; the initial one before its first start.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return decoded(str(path), path.read_bytes(), LoggerState, "a logger's state", "delete it: a new run begins there")
    except FileNotFoundError:
        return LoggerState()


def client(config: Config, name: str) -> LoggerClient:
    """Return a new client of a configured logger."""
    section, shown = config.telemetry, config.run.dir.resolve().name
    if name == "wandb" and section.wandb is not None:
        return Wandb(section.wandb.project, config.run.dir / FOLDER, shown)
    if name == "mlflow" and section.mlflow is not None:
        return Mlflow(section.mlflow.experiment, shown)
    if name == "trackio" and section.trackio is not None:
        return Trackio(section.trackio.project, shown)
    return TensorBoard(config.run.dir / "tensorboard")
