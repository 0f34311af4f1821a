"""What the three loggers have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from asyncmoe.telemetry.loggers.points import LoggedPoint

NAMES = ("wandb", "mlflow", "trackio")
"""Keys of `telemetry`, names of the packages, and names of our extras."""


class Opened(NamedTuple):
    """The logger's run: its id, and its address for people ("" without one)."""

    id: str
    url: str


class Backend(Protocol):
    """A logger's client. Every method may raise whatever the client raises; the sender then starts over with a new one.

    Attributes:
        target: where it sends to, e.g. server and project: a run is continued only where it began.
        most: figures that one `log` should have at most.
        later: how the user sends what the client had taken but not delivered when it was killed; "" if it takes nothing that it has not
            delivered.
    """

    target: str
    most: int
    later: str

    def open(self, id: str | None, points: int, parameters: Mapping[str, Any]) -> Opened:
        """Begin a run, or continue run `id`, to which `points` points were sent. `parameters` is nested; its keys are texts."""

    def log(self, points: Sequence[LoggedPoint]) -> str | None:
        """Take points; after it returns they are not given again. Returns a trouble that the client itself deals with, in one line."""

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table of texts, numbers and None at a step. Only called with `telemetry.loggers.samples`."""

    def close(self, complete: bool) -> str | None:
        """Deliver everything and end the logger's run; `complete`: the trainer took all its steps. Returns what was not delivered."""


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key. An empty mapping stays as it is."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
