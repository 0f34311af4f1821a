"""The processes of a run, as their launcher presents them to the supervision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from signal import Signals
from typing import Protocol

from asyncmoe.launch.failures import Ended

STOP_GRACE_S = 20.0
"""Seconds between asking a process to end and killing it."""


class Process(Ended, Protocol):
    """A process of a run; `asyncmoe.process.Child` implements it for this machine."""

    def signal(self, number: Signals) -> None:
        """Send the process a signal; do nothing if it has ended."""

    def wait(self, seconds: float) -> bool:
        """Wait for the process; true if it ended within `seconds`."""


class Starter(Protocol):
    """Starts the trainer or the controller of a run, again and again, while the others go on."""

    def prepare(self) -> None:
        """Be ready to start the next one quickly, if the launcher can; called again and again while the run goes on."""

    def end(self) -> None:
        """End all of its processes: those of the trainer are asked, and killed if they do not end in time; a controller is killed."""

    def start(self, epoch: int) -> tuple[Process, ...]:
        """Start it, and return its processes; a controller is one. None of its earlier processes may run. `epoch`: how often the trainer
        was started before.

        Raises:
            AsyncmoeError: it cannot be started.
        """


class OnDemand:
    """A `Starter` whose starts are made when they are needed.

    Args:
        start, end: as of a `Starter`.
    """

    def __init__(self, start: Callable[[int], tuple[Process, ...]], end: Callable[[], None]) -> None:
        self.start, self.end = start, end

    def prepare(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Processes:
    """All processes of a run that its launcher started.

    Attributes:
        engines: those that join, or the keeper of this machine's; empty if the controller starts the engines itself.
        starter: starts the trainer again; None: this launcher cannot.
        controllers: starts the controller again; None: engines would end with it.
        settle_s: seconds to wait after a failure for what the launcher has yet to hear of it, even if its cause seems clear.
    """

    controller: Process
    trainers: tuple[Process, ...]
    engines: tuple[Process, ...] = ()
    starter: Starter | None = None
    controllers: Starter | None = None
    settle_s: float = 0.0

    @property
    def all(self) -> tuple[Process, ...]:
        return (self.controller, *self.trainers, *self.engines)

    @property
    def failed(self) -> list[Process]:
        """The processes that ended with a status different from 0."""
        return [process for process in self.all if process.returncode not in (None, 0)]

    @property
    def finished(self) -> bool:
        """True if controller and trainer ended with status 0; how an engine ends after that does not matter."""
        return all(process.returncode == 0 for process in (self.controller, *self.trainers))

    @property
    def others_go_on(self) -> bool:
        """True if the controller runs and no engine has failed."""
        return self.controller.returncode is None and self.engines_go_on

    @property
    def engines_go_on(self) -> bool:
        """True if no engine has failed."""
        return all(engine.returncode in (None, 0) for engine in self.engines)

    @property
    def controller_lost(self) -> bool:
        """True if a signal ended the controller, which it did not ask for: it handles those by which it is asked to end."""
        return self.controller.returncode is not None and self.controller.returncode < 0
