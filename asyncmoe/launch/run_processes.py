"""The parts of a run: the table that each launcher fills, the processes started from it, and the root cause of failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Protocol

from asyncmoe import storage
from asyncmoe.engines.engine_stay import ServerLost
from asyncmoe.errors import RECURRING, AsyncmoeError, UserError
from asyncmoe.launch.rule import CONTROLLER, TRAINER, How, LossRule
from asyncmoe.process import KILLED

STOP_GRACE_S = 20.0
"""Seconds between asking a process to end and killing it."""
_FOLLOWS = ("waited", "was ended by the controller")
"""Words in the reason of a process that failed because it lost another one."""
_MAY_FOLLOW_A_CRASH = (*_FOLLOWS, "no engine is left")
"""Words in the controller's reason if a rank's crash may be the cause: engines that receive the rank's weights can fail with it."""
_CRASHES = (Signals.SIGSEGV, Signals.SIGBUS, Signals.SIGABRT, Signals.SIGFPE, Signals.SIGILL)
"""Signals caused by a process's own fault, in contrast to those sent by another process or the kernel."""
_KILL, _UNEXPLAINED, _LOST = 1, 6, 7
"""Sort keys (`_rank`) of a kill, of a failure without a reason, and of one that the loss of another process explains."""


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


@dataclass
class RunPart:
    """A part of a run: how its launcher starts it, and its current state.

    Attributes:
        loss: the rule for its loss.
        start: starts it, and returns its processes, exactly one for the controller. None of its earlier processes may run. Called with the
            number of its earlier starts; for the controller, that of the trainer's. Raises AsyncmoeError if it cannot be started.
        end: ends all its processes before it restarts. The trainer's are asked first, and killed if they do not end in time.
        due: when to start it, in time.monotonic's seconds; infinite once started.
        lost: how often it was lost and restarted.
        processes: those of its newest start; empty before the next one.
    """

    loss: LossRule
    start: Callable[[int], tuple[Process, ...]]
    end: Callable[[], None]
    due: float = 0.0
    lost: int = 0
    processes: tuple[Process, ...] = ()


RunParts = dict[str, RunPart]
"""The parts of a run by name, in starting order, without those that the run has dropped."""


@dataclass(frozen=True)
class RunProcesses:
    """The processes of all parts of a run."""

    parts: RunParts

    @property
    def controller(self) -> Process | None:
        """None while its next start is awaited."""
        return next(iter(self.parts[CONTROLLER].processes), None)

    @property
    def trainers(self) -> tuple[Process, ...]:
        """Empty while the next start of the trainer is awaited."""
        return self.parts[TRAINER].processes

    @property
    def engines(self) -> tuple[Process, ...]:
        return tuple(one for name, part in self.parts.items() if name not in (CONTROLLER, TRAINER) for one in part.processes)

    @property
    def failed(self) -> list[Process]:
        """The processes that ended with a status different from 0. An engine's end after the controller's does not count."""
        return [process for found in self._of_run.values() for process in found if process.returncode not in (None, 0)]

    @property
    def ended(self) -> dict[str, How]:
        """How each failed part ended; also the controller, if it ended before a trainer that failed."""
        found = {name: _how(here) for name, here in self._of_run.items() if any(one.returncode not in (None, 0) for one in here)}
        return found | ({CONTROLLER: "said"} if self._is_over and TRAINER in found else {})

    @property
    def _is_over(self) -> bool:
        return self.controller is not None and self.controller.returncode == 0

    @property
    def _of_run(self) -> Mapping[str, tuple[Process, ...]]:
        return {name: part.processes for name, part in self.parts.items() if name in (CONTROLLER, TRAINER) or not self._is_over}

    @property
    def finished(self) -> bool:
        """True if controller and trainer ended with status 0; an engine's end after that does not count."""
        main = (self.controller, *self.trainers)
        return len(main) > 1 and all(process is not None and process.returncode == 0 for process in main)


def _how(processes: tuple[Process, ...]) -> How:
    statuses = [process.returncode or 0 for process in processes]
    if ServerLost.exit_code in statuses:
        return "used up"
    return "lost" if min(statuses) < 0 else "said"


def root_cause(failed: Sequence[Process]) -> AsyncmoeError:
    """Return the error of the root-cause failure, with its exit code if the failure would recur. `failed` must not be empty."""
    first = min(failed, key=_rank)
    if first.reason is None and (full := storage.probe(first.log.parent)) is not None:  # a full disk keeps reasons out of the logs
        named = storage.explain(full, f"log of {first.name}, which ended with status {first.returncode}", first.log)
        return named or AsyncmoeError(str(full))
    return AsyncmoeError(first.why(), exit_code=first.returncode if first.returncode in RECURRING else None)


def explained(failed: Sequence[Process]) -> bool:
    """Return whether one of the failures has a reason of its own."""
    return min(map(_rank, failed)) < _UNEXPLAINED


def certain(failed: Sequence[Process]) -> bool:
    """Return whether one of the failures is a user error or a kill, and so no consequence of a failure yet to be seen."""
    return min(map(_rank, failed)) <= _KILL


def only_lost(failed: Sequence[Process]) -> bool:
    """Return whether all failures are reactions to the loss of another process."""
    return all(_rank(process) == _LOST for process in failed)


def _rank(ended: Process) -> int:
    """Return the sort key of a failure: a user error with its reason first, then a kill, the controller's own reason, wrong numbers or
    programs, a crash, another own reason, no reason, and the loss of another process.

    The controller's own reason precedes a crash, because a rank may crash while it ends for lack of a controller; a kill has another cause.
    """
    status, reason = ended.returncode, ended.reason or ""
    if status == UserError.exit_code and reason:  # a full disk may keep some reasons out of the logs
        return 0
    if (status is not None and status < 0) or reason.startswith(KILLED):
        named = reason.startswith(tuple(f"{KILLED} {number.name}" for number in _CRASHES))
        return 4 if named or (not reason.startswith(KILLED) and -(status or 0) in _CRASHES) else _KILL
    if not reason:
        return _UNEXPLAINED
    if ended.name.split()[0] == "controller" and not any(words in reason for words in _MAY_FOLLOW_A_CRASH):
        return 2
    if status in RECURRING:
        return 3
    return _LOST if any(words in reason for words in _FOLLOWS) else 5
