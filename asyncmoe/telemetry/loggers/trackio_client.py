"""Trackio: SQLite on this machine, a Hugging Face Space, or a private server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

from asyncmoe.telemetry.loggers.points import LoggedPoint, flat


class Trackio:
    """A run of Trackio; implements `LoggerClient`.

    Trackio finds the run to continue by its name, so the name ends with an id. Once a run is open, Trackio raises nothing: it warns, stores
    unsent values on this machine, and sends them later itself.

    Args:
        name: first part of the run's name.
    """

    def __init__(self, project: str, name: str) -> None:
        self._project, self._name = project, name
        self._run: Any = None

    def open(self, id: str | None, points: int, parameters: Mapping[str, Any]) -> tuple[str, str]:
        """See `LoggerClient`."""
        import trackio

        name = id or f"{self._name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(
            project=self._project,
            name=name,
            config=flat(parameters),
            resume="allow",
            private=True if "TRACKIO_SPACE_ID" in os.environ else None,
            embed=False,
            auto_log_cpu=False,
        )
        return name, ""

    def log(self, point: LoggedPoint) -> None:
        """See `LoggerClient`."""
        self._run.log(dict(point.values), step=point.step)

    def close(self, complete: bool) -> None:
        """See `LoggerClient`."""
        import trackio

        trackio.finish()
