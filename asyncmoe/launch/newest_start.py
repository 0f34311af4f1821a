"""What the restarts of trainer and controller have in common: the steps trained since the newest start, and the wait for the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from asyncmoe.launch.run_processes import Process
from asyncmoe.launch.watching import ProcessSilent
from asyncmoe.telemetry.follow import Followed
from asyncmoe.telemetry.live import LiveView
from asyncmoe.telemetry.schema import Step

_POLL_S = 0.25


class NewestStart:
    """The steps trained since the newest start of a part. A `Sink` of the live view, which feeds it the steps that the trainer records.

    Attributes:
        step: highest of them; 0: none.
    """

    def __init__(self) -> None:
        self.step = 0
        self._since: float | None = None

    def feed(self, records: Sequence[Followed]) -> None:
        """Take new records."""
        steps = [record for record in records if isinstance(record, Step)]
        self.step = max([self.step, *(record.step for record in steps)])
        if self._since is None and any(record.phase == "rl" for record in steps):
            self._since = time.monotonic()

    def close(self) -> None:
        """Nothing: it holds nothing."""

    def last_steps(self, view: LiveView) -> int:
        """Return `step` of a start that has ended, once its last records are read."""
        with suppress(ProcessSilent):
            view.refresh()
        return self.step

    def ended(self) -> None:
        """Begin anew, with the next start."""
        self.step, self._since = 0, None

    def trains_for(self, seconds: float) -> bool:
        """Whether its first step of reinforcement learning was trained so many seconds ago."""
        return self._since is not None and time.monotonic() - self._since > seconds


def start_after(
    seconds: float, start: Callable[[], tuple[Process, ...]], goes_on: Callable[[], bool], view: LiveView
) -> tuple[Process, ...] | None:
    """Start a part again after a while, and return its processes; None if the run did not go on for so long."""
    until = time.monotonic() + seconds
    while goes_on():
        if time.monotonic() >= until:
            return start()
        view.refresh()
        time.sleep(_POLL_S)
    return None
