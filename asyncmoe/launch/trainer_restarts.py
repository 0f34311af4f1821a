"""Starts the trainer of a run again, in place, when it is lost: what follows from the decisions of `asyncmoe.launch.trainer_starts`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.run_processes import TrainerStarter
from asyncmoe.launch.trainer_starts import Allowance, EndRun, StartAgain, StartFailure, decide
from asyncmoe.launch.watching import ProcessSilent, Watcher
from asyncmoe.telemetry.follow import Followed
from asyncmoe.telemetry.live import LiveView
from asyncmoe.telemetry.schema import Step

T = TypeVar("T")
_POLL_S = 0.25


class TrainerRestarts:
    """The starts of one run's trainer. A `Sink` of the live view, which feeds it the steps that the trainer records."""

    def __init__(self, config: Config, watcher: Watcher) -> None:
        self._config, self._watcher = config, watcher
        self._history: list[StartFailure] = []
        self._step = 0
        """Highest step trained since the last start."""

    def feed(self, records: Sequence[Followed]) -> None:
        """Take new records."""
        self._step = max([self._step, *(record.step for record in records if isinstance(record, Step))])

    def close(self) -> None:
        """Nothing: it holds nothing."""

    def again(
        self,
        error: AsyncmoeError,
        starter: TrainerStarter[T] | None,
        others: Callable[[], bool],
        stopping: Callable[[], bool],
        view: LiveView,
    ) -> T | None:
        """Start the trainer again after a failure of the run.

        Args:
            error: the root cause of the failure.
            starter: None: the launcher cannot start a trainer again.
            others: whether controller and engines go on.
            stopping: whether the user has asked the run to stop.

        Returns:
            The trainer; None if it was not started after all, because the run began to stop or lost its controller too.

        Raises:
            AsyncmoeError: the run ends; names the root cause.
        """
        with suppress(ProcessSilent):
            view.refresh()  # the last steps that the trainer recorded
        failed = StartFailure(str(error), error.exit_code, self._step)
        went_on = others() and not (isinstance(error, ProcessSilent) and error.controller)
        section, journal = self._config.trainer, self._config.journal.enabled
        decision = decide(self._history, failed, Allowance(section.max_restarts, journal, went_on, stopping()))
        if isinstance(decision, EndRun) or starter is None:
            raise self._in_context(error, decision, went_on)
        self._say(decision, error, view)
        self._history.append(failed)
        self._step = 0
        starter.end()
        self._watcher.forget()
        until = time.monotonic() + decision.after_s
        while others() and not stopping():
            if time.monotonic() >= until:
                return starter.start(decision.epoch)
            view.refresh()
            time.sleep(_POLL_S)
        return None

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
        most, why = self._config.trainer.max_restarts, self._watcher.named(error)
        text = f"the trainer starts again{when}, restart {decision.row} of {most} without a new step: {why}"
        view.say(text)
        self._watcher.lost("trainer_lost", text)
