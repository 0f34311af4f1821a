"""What SLURM and the user ask of a batch script."""

from __future__ import annotations

import signal
from types import FrameType


class Stop:
    """What was asked by signals so far. Make it before any long import: a signal that is not handled ends a process.

    Attributes:
        requeue: SIGUSR1, which SLURM sends before the time limit: save, end, and go back into the queue.
        save: that or SIGINT: save and end.
        now: SIGTERM: end.
    """

    def __init__(self) -> None:
        self.requeue = self.save = self.now = False
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requeue |= number == signal.SIGUSR1
        self.save |= number in (signal.SIGUSR1, signal.SIGINT)
        self.now |= number == signal.SIGTERM
