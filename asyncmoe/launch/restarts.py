"""Starts the trainer or the controller of a run again, in place, when it is lost or hangs, while the others go on: what follows from the
decisions of `asyncmoe.launch.trainer_starts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.newest_start import NewestStart, start_after
from asyncmoe.launch.run_processes import Process, Starter
from asyncmoe.launch.trainer_starts import Allowance, EndRun, StartFailure, decide
from asyncmoe.launch.watching import ProcessSilent, Watcher
from asyncmoe.telemetry.live import LiveView

PREPARED_AFTER_S = {"trainer": 60.0, "controller": 20.0}
"""Seconds after the first step of reinforcement learning of a start in which the next one is not prepared: short runs do without, and
starts take the cores."""


class PartRestarts:
    """The starts of one part of a run.

    Attributes:
        newest: the newest of them.
    """

    def __init__(self, config: Config, watcher: Watcher, part: Literal["trainer", "controller"]) -> None:
        trainer = config.trainer
        self._watcher, self._part = watcher, part
        if part == "trainer":
            self._most, self._key, self._logged = trainer.max_restarts, "trainer.max_restarts", config.log.enabled
        else:
            self._most, self._key, self._logged = config.run.controller_restarts, "run.controller_restarts", True
        self._prepares = self._most > 0 and self._logged and (trainer.standby or part == "controller")
        self._history: list[StartFailure] = []
        self.newest = NewestStart()

    @property
    def count(self) -> int:
        """How often the part was started again."""
        return len(self._history)

    def prepare(self, starter: Starter) -> None:
        """Have the next start prepared, if it is time."""
        if self._prepares and self.newest.trains_for(PREPARED_AFTER_S[self._part]):
            starter.prepare()

    def again(
        self,
        error: AsyncmoeError,
        starter: Starter | None,
        others: Callable[[], bool],
        stopping: Callable[[], bool],
        view: LiveView,
        epoch: int,
    ) -> tuple[Process, ...] | None:
        """Start the part again after a failure of the run.

        Args:
            error: the root cause of the failure.
            starter: None: the launcher cannot start the part again.
            others: whether the parts that it needs go on.
            stopping: whether the user has asked the run to stop.
            epoch: see `Starter.start`.

        Returns:
            The processes of the part; None if it was not started after all, because the run began to stop or lost the others too.

        Raises:
            AsyncmoeError: the run ends; names the root cause.
        """
        failed = StartFailure(str(error), error.exit_code, self.newest.last_steps(view))
        went_on = others() and not (self._part == "trainer" and isinstance(error, ProcessSilent) and error.controller)
        decision = decide(self._history, failed, Allowance(self._most, self._logged, went_on, stopping(), self._part, self._key))
        if isinstance(decision, EndRun) or starter is None:
            raise self._in_context(error, decision.why if isinstance(decision, EndRun) else "", went_on)
        when = f" in {decision.after_s:.0f} s" if decision.after_s else ""
        row, why = f"{decision.row} of {self._most}", self._watcher.named(error)
        text = f"the {self._part} starts again{when}, restart {row} without a new step: {why}"
        view.say(text)
        self._watcher.lost("trainer_lost" if self._part == "trainer" else "controller_lost", text)
        self._history.append(failed)
        self.newest.ended()
        starter.end()
        self._watcher.forget(self._part)
        return start_after(decision.after_s, lambda: starter.start(epoch), lambda: others() and not stopping(), view)

    def _in_context(self, error: AsyncmoeError, more: str, went_on: bool) -> AsyncmoeError:
        """Return the error that ends the run, with the loss of the part from which it may follow."""
        if not went_on and self._history and not self.newest.step:
            more = f"the {self._part} was lost before: {self._history[-1].why}"
        if not more:
            return error
        told = AsyncmoeError(f"{error}; {more}")
        told.exit_code = error.exit_code
        return told
