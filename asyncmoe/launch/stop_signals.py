"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
from types import FrameType


class StopOnSignal:
    """Counts SIGINT, SIGTERM and SIGHUP, so that none ends the program at an arbitrary point before the user insists.

    After SIGHUP, what is written to the terminal that is gone is dropped: a write to it fails. SIGHUP stays ignored where it is (nohup).

    Attributes:
        count: signals so far. From the third on each raises KeyboardInterrupt, which ends a wait for processes that do not end.
        number: the first signal.
    """

    def __init__(self) -> None:
        self.count, self.number = 0, int(signal.SIGINT)
        self._terminal = [number for number in (1, 2) if os.isatty(number)]
        hears = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        numbers = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hears else ()))
        self._old = {n: signal.signal(n, self._handle) for n in numbers}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for terminal in self._terminal:
                os.dup2(nowhere, terminal)
            os.close(nowhere)
        self.number = self.number if self.count else number
        self.count += 1
        if self.count > 2:
            raise KeyboardInterrupt

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
