"""Starts the controller of a run again, in place, when a signal ended it or it hangs, while engines and trainer go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.newest_start import NewestStart, start_after
from asyncmoe.launch.run_processes import ControllerStarter
from asyncmoe.launch.trainer_starts import Allowance, EndRun, StartFailure, decide
from asyncmoe.launch.watching import Watcher
from asyncmoe.telemetry.live import LiveView

T = TypeVar("T")
PREPARED_AFTER_S = 20.0
"""Seconds after a controller's first step of reinforcement learning in which the next one is not prepared: starts take the cores."""


class ControllerRestarts:
    """The starts of one run's controller.

    Attributes:
        newest: the newest of them.
    """

    def __init__(self, config: Config, watcher: Watcher) -> None:
        self._config, self._watcher = config, watcher
        self._history: list[StartFailure] = []
        self.newest = NewestStart()

    def prepare(self, starter: ControllerStarter[T]) -> None:
        """Have the next controller prepared, if it is time."""
        if self._config.run.controller_restarts and self.newest.trains_for(PREPARED_AFTER_S):
            starter.prepare()

    def again(
        self, error: AsyncmoeError, starter: ControllerStarter[T], others: Callable[[], bool], stopping: Callable[[], bool], view: LiveView
    ) -> T | None:
        """Start the controller again.

        Args:
            error: why it was lost.
            others: whether the engines go on.
            stopping: whether the user has asked the run to stop.

        Returns:
            The controller; None if it was not started after all, because the run began to stop or the engines are lost too.

        Raises:
            AsyncmoeError: the run ends; names the root cause.
        """
        failed = StartFailure(str(error), error.exit_code, self.newest.last_steps(view))
        most = self._config.run.controller_restarts
        allowance = Allowance(most, True, others(), stopping(), "controller", "run.controller_restarts")
        decision = decide(self._history, failed, allowance)
        if isinstance(decision, EndRun):
            if not decision.why:
                raise error
            told = AsyncmoeError(f"{error}; {decision.why}")
            told.exit_code = error.exit_code
            raise told
        when = f" in {decision.after_s:.0f} s" if decision.after_s else ""
        text = f"the controller starts again{when}, restart {decision.row} of {most} without a new step: {self._watcher.named(error)}"
        view.say(text)
        self._watcher.lost("controller_lost", text)
        self._history.append(failed)
        self.newest.ended()
        starter.end()
        self._watcher.forget("controller")
        return start_after(decision.after_s, starter.start, lambda: others() and not stopping(), view)
