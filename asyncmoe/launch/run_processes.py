"""The parts of a run: the one table that each launcher fills, and the processes that were started from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Protocol

from asyncmoe.engines.engine_stay import ServerLost
from asyncmoe.launch.rule import CONTROLLER, TRAINER, How, LossRule

STOP_GRACE_S = 20.0
"""Seconds between asking a process to end and killing it."""


class Process(Protocol):
    """A process of a run; `asyncmoe.process.Child` implements it for this machine."""

    @property
    def name(self) -> str:
        """Name of the process in messages."""

    @property
    def log(self) -> Path:
        """Log file of the process."""

    @property
    def returncode(self) -> int | None:
        """Exit status, negative signal number, or None while it runs."""

    @property
    def reason(self) -> str | None:
        """The reason that the process gave for its end; None if it gave none."""

    def why(self) -> str:
        """The reason that the process gave for its end; without one, its status and its log."""

    def signal(self, number: Signals) -> None:
        """Send the process a signal; do nothing if it has ended."""

    def wait(self, seconds: float) -> bool:
        """Wait for the process; true if it ended within `seconds`."""


@dataclass(frozen=True)
class RunPart:
    """A part of a run, as its launcher starts it.

    Attributes:
        loss: what its loss means.
        start: starts it, and returns its processes; of the controller there is one. None of its earlier processes may run. Called with
            the number of its earlier starts, for the controller that of the trainer's. Raises AsyncmoeError if it cannot be started.
        end: ends all of its processes, before it starts again: those of the trainer are asked first, and killed if they do not end in time.
    """

    loss: LossRule
    start: Callable[[int], tuple[Process, ...]]
    end: Callable[[], None] = lambda: None


RunParts = Mapping[str, RunPart]
"""The parts of a run by name, in the order in which they start."""


@dataclass
class RunProcesses:
    """The processes of a run, by part; those of a part that waits for its next start, or without which the run goes on, are left out."""

    by_part: dict[str, tuple[Process, ...]] = field(default_factory=dict)

    @property
    def controller(self) -> Process | None:
        """None while its next start is awaited."""
        return next(iter(self.by_part.get(CONTROLLER, ())), None)

    @property
    def trainers(self) -> tuple[Process, ...]:
        """Empty while the next start of the trainer is awaited."""
        return self.by_part.get(TRAINER, ())

    @property
    def engines(self) -> tuple[Process, ...]:
        return tuple(one for name, found in self.by_part.items() if name not in (CONTROLLER, TRAINER) for one in found)

    @property
    def failed(self) -> list[Process]:
        """The processes that ended with a status different from 0. How an engine ends after the controller does not matter."""
        return [process for found in self._of_run.values() for process in found if process.returncode not in (None, 0)]

    @property
    def ended(self) -> dict[str, How]:
        """How the parts ended that failed; and the controller, if it has ended before a trainer that failed."""
        found = {name: _how(here) for name, here in self._of_run.items() if any(one.returncode not in (None, 0) for one in here)}
        return found | ({CONTROLLER: "said"} if self._is_over and TRAINER in found else {})

    @property
    def _is_over(self) -> bool:
        return self.controller is not None and self.controller.returncode == 0

    @property
    def _of_run(self) -> Mapping[str, tuple[Process, ...]]:
        return {name: found for name, found in self.by_part.items() if name in (CONTROLLER, TRAINER) or not self._is_over}

    @property
    def finished(self) -> bool:
        """True if controller and trainer ended with status 0; how an engine ends after that does not matter."""
        main = (self.controller, *self.trainers)
        return len(main) > 1 and all(process is not None and process.returncode == 0 for process in main)


def _how(processes: tuple[Process, ...]) -> How:
    statuses = [process.returncode or 0 for process in processes]
    if ServerLost.exit_code in statuses:
        return "used up"
    return "lost" if min(statuses) < 0 else "said"
