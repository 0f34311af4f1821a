"""What this package's commands share: the signals that stop a batch script, and a main function that reports errors in one line."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from asyncmoe.errors import AsyncmoeError
from asyncmoe.process import say


class Stop:
    """The stop requests received so far. Create it before any long import, because an unhandled signal ends the process.

    Attributes:
        requeue: SIGUSR1, which SLURM sends before the time limit, was received: save, end and requeue.
        save: SIGUSR1 or SIGINT was received: save and end.
        now: SIGTERM was received: end.
    """

    def __init__(self) -> None:
        self.requeue = self.save = self.now = False
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requeue |= number == signal.SIGUSR1
        self.save |= number in (signal.SIGUSR1, signal.SIGINT)
        self.now |= number == signal.SIGTERM


def main(run: Callable[[Sequence[str], Stop], None]) -> None:
    """Install the signal handlers, then call `run` with the arguments of the command.

    The exit status of a failure tells a user error from others.
    """
    stop = Stop()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    try:
        run(sys.argv[1:], stop)
    except AsyncmoeError as error:
        say(error)
        sys.exit(error.exit_code)
