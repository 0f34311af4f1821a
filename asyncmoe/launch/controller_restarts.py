"""Starts the controller of a run again, in place, when a signal ended it or it hangs, while engines and trainer go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.run_processes import ControllerStarter, Process, Processes
from asyncmoe.launch.trainer_starts import Allowance, EndRun, StartFailure, decide
from asyncmoe.launch.watching import ProcessSilent, Watcher
from asyncmoe.telemetry.follow import Followed
from asyncmoe.telemetry.live import LiveView
from asyncmoe.telemetry.schema import Step

PREPARED_AFTER_S = 20.0
"""Seconds after a controller's first step of reinforcement learning in which the next one is not prepared: starts take the cores."""
_POLL_S = 0.25


class ControllerRestarts:
    """The starts of one run's controller. A `Sink` of the live view, which feeds it the steps that the trainer records."""

    def __init__(self, config: Config, watcher: Watcher) -> None:
        self._config, self._watcher = config, watcher
        self._history: list[StartFailure] = []
        self._step = 0
        """Highest step trained since the last start."""
        self._since: float | None = None

    def feed(self, records: Sequence[Followed]) -> None:
        """Take new records."""
        steps = [record for record in records if isinstance(record, Step)]
        self._step = max([self._step, *(record.step for record in steps)])
        if self._since is None and any(record.phase == "rl" for record in steps):
            self._since = time.monotonic()

    def close(self) -> None:
        """Nothing: it holds nothing."""

    def prepare(self, starter: ControllerStarter) -> None:
        """Have the next controller prepared, if it is time."""
        due = self._since is not None and time.monotonic() - self._since > PREPARED_AFTER_S
        if due and self._config.run.controller_restarts:
            starter.prepare()

    def again(
        self, error: AsyncmoeError, starter: ControllerStarter, processes: Processes, stopping: Callable[[], bool], view: LiveView
    ) -> Process | None:
        """Start the controller again.

        Args:
            error: why it was lost.
            stopping: whether the user has asked the run to stop.

        Returns:
            The controller; None if it was not started after all, because the run began to stop or the engines are lost too.

        Raises:
            AsyncmoeError: the run ends; names the root cause.
        """
        with suppress(ProcessSilent):
            view.refresh()  # the last steps that the trainer recorded
        failed = StartFailure(str(error), error.exit_code, self._step)
        most = self._config.run.controller_restarts
        allowance = Allowance(most, True, processes.engines_go_on, stopping(), "controller", "run.controller_restarts")
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
        self._step, self._since = 0, None
        starter.end()
        self._watcher.forget("controller")
        until = time.monotonic() + decision.after_s
        while processes.engines_go_on and not stopping():
            if time.monotonic() >= until:
                return starter.start()
            view.refresh()
            time.sleep(_POLL_S)
        return None
