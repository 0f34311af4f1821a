"""Watching the processes of a run, wherever they are, until all have ended or one has failed.

Ctrl-C is passed to the controller, which tells the trainer at its next step to save a checkpoint; the same command then goes on from
there. A second Ctrl-C ends everything at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from types import FrameType
from typing import Protocol

from asyncmoe import checkpoints, storage
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.process import KILLED
from asyncmoe.telemetry.live import LiveView
from asyncmoe.telemetry.records import read_steps
from asyncmoe.telemetry.report import report
from asyncmoe.telemetry.schema import METRICS
from asyncmoe.telemetry.summary import write_summary

STOP_GRACE_S = 20.0
"""Between asking a process to end and ending it."""
_POLL_S = 0.25
_SETTLE_S, _UNEXPLAINED_S = 1.0, 6.0
"""After the first failure: the others say what they think of it, and have longer for it where none has said why."""
_INTERRUPTED = 130
"""Status of a command that Ctrl-C reached before it had set itself up to be asked."""
_FOLLOWS = ("waited", "was given up")
"""Words of those who lost another process."""
_UNEXPLAINED = 3
"""Rank of a failure that nobody has given a reason for."""


class Ended(Protocol):
    """A process of a run, as far as its end goes."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def log(self) -> Path:
        """Where more is to be found."""

    @property
    def returncode(self) -> int | None:
        """Exit status, negative signal number, or None while it runs."""

    @property
    def reason(self) -> str | None:
        """What it gave as the reason for its end."""

    def why(self) -> str:
        """The reason it gave for ending, or else where to look."""


class Process(Ended, Protocol):
    """A process of a run; `asyncmoe.process.Child` is one on this machine."""

    def signal(self, number: Signals) -> None:
        """Send it a signal; nothing when it has ended."""

    def wait(self, seconds: float) -> bool:
        """True when it ended within `seconds`."""


@dataclass(frozen=True)
class Processes:
    """All processes of a run that its launcher has started. Engines are here only where they join by themselves."""

    controller: Process
    trainers: tuple[Process, ...]
    engines: tuple[Process, ...] = ()

    @property
    def all(self) -> tuple[Process, ...]:
        return (self.controller, *self.trainers, *self.engines)

    @property
    def failed(self) -> list[Process]:
        """Those that have ended otherwise than well."""
        return [process for process in self.all if process.returncode not in (None, 0)]

    @property
    def finished(self) -> bool:
        """Controller and trainer have ended well; what becomes of an engine after that does not matter."""
        return all(process.returncode == 0 for process in (self.controller, *self.trainers))


def supervise(config: Config, start: Callable[[ExitStack], Processes]) -> dict[str, object]:
    """Start the processes of a prepared run, show and watch it to its end, and return its summary.

    Args:
        start: starts them, and has the stack end each of them.

    Raises:
        AsyncmoeError: a process failed, or the run was stopped.
    """
    stop = StopOnSignal()
    try:
        with LiveView(config) as view, ExitStack() as ending:
            _watch(start(ending), view, stop)
    finally:
        stop.restore()
    if stop.count and not read_steps(config.run.dir / METRICS):
        raise AsyncmoeError("stopped before the first step; the same command begins anew")
    with storage.writing("summary and report of the run", config.run.dir):
        summary = write_summary(config.run.dir)
        report(config.run.dir)
    if stop.count:
        raise AsyncmoeError(f"stopped at a checkpoint; the same command goes on from {checkpoints.newest(config.run.dir)}")
    return summary


def _watch(processes: Processes, view: LiveView, stop: StopOnSignal) -> None:
    controller, trainers = processes.controller, processes.trainers
    told = 0
    while not processes.finished:
        view.refresh()
        if stop.count > told:
            told = stop.count
            if told > 1:
                raise AsyncmoeError("ended at once; what was not in a checkpoint is lost")
            view.say("stopping: saving a checkpoint (Ctrl-C again ends at once)")
            controller.signal(signal.SIGINT)
        if stop.count and controller.returncode in (0, _INTERRUPTED):  # all was said, or there was no trainer yet to say it to
            _late(trainers)
            break
        if processes.failed:
            _settle(processes)
            raise failure(processes.failed)
        if all(trainer.returncode == 0 for trainer in trainers) and not controller.wait(STOP_GRACE_S):
            raise AsyncmoeError(f"the controller did not end within {STOP_GRACE_S:.0f} s of the trainer; its log is {controller.log}")
        if controller.returncode == 0 and _late(trainers):
            raise AsyncmoeError(f"the controller ended before the trainer; its log is {controller.log}")
        time.sleep(_POLL_S)
    # The controller has told those that have joined. One that has not would wait for it.
    _late(processes.engines)
    view.refresh()


def _late(processes: tuple[Process, ...]) -> list[Process]:
    """Those that have not ended when the time that they have for it together is over."""
    until = time.monotonic() + STOP_GRACE_S
    return [process for process in processes if not process.wait(max(0.0, until - time.monotonic()))]


def _settle(processes: Processes) -> None:
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < _UNEXPLAINED_S:
        if waited > _SETTLE_S and min(map(_rank, processes.failed)) < _UNEXPLAINED:
            return
        time.sleep(_POLL_S)


def failure(failed: Sequence[Ended]) -> AsyncmoeError:
    """The error for the one that the ends of the others follow from; of a mistake of the user's it has the exit code. Not empty."""
    first = min(failed, key=_rank)
    if first.reason is None and (full := storage.probe(first.log.parent)) is not None:  # then no log has a reason
        named = storage.explain(full, f"log of {first.name}, which ended with status {first.returncode}", first.log)
        return named or AsyncmoeError(str(full))
    error = AsyncmoeError(first.why())
    error.exit_code = UserError.exit_code if first.returncode == UserError.exit_code else AsyncmoeError.exit_code
    return error


def _rank(ended: Ended) -> int:
    """A user's mistake comes first, then what a signal ended, then one with a reason of its own, then one that lost another."""
    status, reason = ended.returncode, ended.reason
    if status == UserError.exit_code:
        return 0
    if (status is not None and status < 0) or (reason or "").startswith(KILLED):
        return 1
    if reason is None:
        return _UNEXPLAINED
    return 4 if any(words in reason for words in _FOLLOWS) else 2


class StopOnSignal:
    """Counts SIGINT and SIGTERM instead of raising in the middle of something."""

    def __init__(self) -> None:
        self.count = 0
        self._old = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
