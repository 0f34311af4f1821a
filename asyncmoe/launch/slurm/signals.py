"""Signals by which SLURM and the user stop a batch script."""

from __future__ import annotations

import signal
from types import FrameType


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
