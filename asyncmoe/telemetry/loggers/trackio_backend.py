"""Trackio: SQLite on this machine, a Hugging Face Space, or a server of one's own."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe.config.telemetry import TrackioSection
from asyncmoe.telemetry.loggers.backend import Opened, flat
from asyncmoe.telemetry.loggers.points import LoggedPoint


class Trackio:
    """A run of Trackio; implements `Backend`.

    Trackio continues a run by its name, so the name ends with an id. Once a run is open it raises nothing: it warns, keeps what it cannot
    send on this machine, and sends it itself.

    Args:
        name: first part of the run's name if the configuration has none.
    """

    most = 10_000
    later = ""

    def __init__(self, section: TrackioSection, name: str) -> None:
        self._section, self._name = section, section.name or name
        self._run: Any = None
        self._warned: list[str] = []
        where = section.space_id or section.server_url or os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL") or ""
        self._local = not where
        self.target = f"{where} {section.project}"

    def open(self, id: str | None, points: int, parameters: Mapping[str, Any]) -> Opened:
        """See `Backend`."""
        import trackio

        warnings.showwarning = self._note  # type: ignore[assignment]  # its further arguments do not matter here
        section = self._section
        name = id or f"{self._name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(
            project=section.project,
            name=name,
            group=section.group,
            space_id=section.space_id,
            server_url=section.server_url,
            config=flat(parameters),
            resume="allow",
            private=None if self._local else True,
            embed=False,
            auto_log_cpu=False,
        )
        return Opened(name, "")

    def log(self, points: Sequence[LoggedPoint]) -> str | None:
        """See `Backend`."""
        for point in points:
            self._run.log(dict(point.values), step=point.step)
        return self._warning()

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """See `Backend`."""
        import trackio

        self._run.log({name: trackio.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def close(self, complete: bool) -> str | None:
        """See `Backend`."""
        import trackio

        trackio.finish()
        return self._warning()

    def _note(self, message: Warning | str, category: type[Warning], *_: object) -> None:
        if category is UserWarning:  # Trackio's own; the others are for developers
            self._warned.append(str(message))

    def _warning(self) -> str | None:
        said, self._warned = self._warned, []
        return " ".join(said[0].split()) if said else None
