"""Starts the trainer of a run again, in place, when it is lost: what follows from the decisions of `asyncmoe.launch.trainer_starts`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.run_processes import Processes
from asyncmoe.launch.stop_signals import StopOnSignal
from asyncmoe.launch.trainer_starts import Allowance, EndRun, StartAgain, TrainerFailure, decide
from asyncmoe.launch.watching import ProcessSilent, Watcher
from asyncmoe.telemetry.follow import Followed
from asyncmoe.telemetry.live import LiveView
from asyncmoe.telemetry.schema import Step

_POLL_S = 0.25


class TrainerRestarts:
    """The starts of one run's trainer. A `Sink` of the live view, which feeds it the steps that the trainer records."""

    def __init__(self, config: Config, watcher: Watcher) -> None:
        self._config, self._watcher = config, watcher
        self._history: list[TrainerFailure] = []
        self._step = 0
        """Highest step trained since the last start."""

    def feed(self, records: Sequence[Followed]) -> None:
        """Take new records."""
        self._step = max([self._step, *(record.step for record in records if isinstance(record, Step))])

    def close(self) -> None:
        """Nothing: it holds nothing."""

    def after(self, processes: Processes, error: AsyncmoeError, view: LiveView, stop: StopOnSignal) -> Processes:
        """Return the processes of the run after a failure, with a trainer that was started again.

        Args:
            error: the root cause of the failure of `processes`.

        Raises:
            AsyncmoeError: the run ends; names the root cause.
        """
        with suppress(ProcessSilent):
            view.refresh()  # the last steps that the trainer recorded
        failed = TrainerFailure(str(error), error.exit_code, self._step)
        went_on = _others_go_on(processes) and not (isinstance(error, ProcessSilent) and error.controller)
        section, journal = self._config.trainer, self._config.journal.enabled
        decision = decide(self._history, failed, Allowance(section.max_restarts, journal, went_on, stop.count > 0))
        if isinstance(decision, EndRun) or processes.starter is None:
            raise self._in_context(error, decision, went_on)
        self._say(decision, error, view)
        self._history.append(failed)
        self._step = 0
        processes.starter.end()
        self._watcher.forget_trainer()
        if not self._waited(decision.after_s, processes, view, stop):
            return replace(processes, trainers=())
        return replace(processes, trainers=processes.starter.start(decision.epoch))

    def _in_context(self, error: AsyncmoeError, decision: StartAgain | EndRun, went_on: bool) -> AsyncmoeError:
        """Return the error that ends the run, with the loss of the trainer from which it may follow."""
        more = decision.why if isinstance(decision, EndRun) else ""
        if not went_on and self._history and not self._step:
            more = f"the trainer was lost before: {self._history[-1].why}"
        if not more:
            return error
        told = AsyncmoeError(f"{error}; {more}")
        told.exit_code = error.exit_code
        return told

    def _say(self, decision: StartAgain, error: AsyncmoeError, view: LiveView) -> None:
        when = f" in {decision.after_s:.0f} s" if decision.after_s else ""
        times = f"restart {decision.row} of {self._config.trainer.max_restarts} without a new step"
        text = f"the trainer starts again{when}, {times}: {self._watcher.named(error)}"
        view.say(text)
        self._watcher.trainer_lost(text)

    def _waited(self, seconds: float, processes: Processes, view: LiveView, stop: StopOnSignal) -> bool:
        """Wait before a start; false if the trainer is not to be started any more: the run is stopping, or has lost its controller too."""
        until = time.monotonic() + seconds
        while not stop.count and _others_go_on(processes):
            if time.monotonic() >= until:
                return True
            view.refresh()
            time.sleep(_POLL_S)
        return False


def _others_go_on(processes: Processes) -> bool:
    return processes.controller.returncode is None and all(engine.returncode in (None, 0) for engine in processes.engines)
