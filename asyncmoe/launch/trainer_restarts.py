"""Starts the trainer of a run again, in place, when it is lost: what follows from the decisions of `asyncmoe.launch.trainer_starts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.newest_start import NewestStart, start_after
from asyncmoe.launch.run_processes import TrainerStarter
from asyncmoe.launch.trainer_starts import Allowance, EndRun, StartAgain, StartFailure, decide
from asyncmoe.launch.watching import ProcessSilent, Watcher
from asyncmoe.telemetry.live import LiveView

T = TypeVar("T")
PREPARED_AFTER_S = 60.0
"""Seconds after a trainer's first step of reinforcement learning in which the next one is not prepared: short runs do without, and starts
take the cores."""


class TrainerRestarts:
    """The starts of one run's trainer.

    Attributes:
        newest: the newest of them.
    """

    def __init__(self, config: Config, watcher: Watcher) -> None:
        self._config, self._watcher = config, watcher
        self._history: list[StartFailure] = []
        self.newest = NewestStart()

    def prepare(self, starter: TrainerStarter[T]) -> None:
        """Have the next trainer prepared, if it is time."""
        section = self._config.trainer
        if section.standby and section.max_restarts and self._config.journal.enabled and self.newest.trains_for(PREPARED_AFTER_S):
            starter.prepare()

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
        failed = StartFailure(str(error), error.exit_code, self.newest.last_steps(view))
        went_on = others() and not (isinstance(error, ProcessSilent) and error.controller)
        section, journal = self._config.trainer, self._config.journal.enabled
        decision = decide(self._history, failed, Allowance(section.max_restarts, journal, went_on, stopping()))
        if isinstance(decision, EndRun) or starter is None:
            raise self._in_context(error, decision, went_on)
        self._say(decision, error, view)
        self._history.append(failed)
        self.newest.ended()
        starter.end()
        self._watcher.forget()
        return start_after(decision.after_s, lambda: starter.start(decision.epoch), lambda: others() and not stopping(), view)

    def _in_context(self, error: AsyncmoeError, decision: StartAgain | EndRun, went_on: bool) -> AsyncmoeError:
        """Return the error that ends the run, with the loss of the trainer from which it may follow."""
        more = decision.why if isinstance(decision, EndRun) else ""
        if not went_on and self._history and not self.newest.step:
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
