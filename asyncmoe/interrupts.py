"""Signals that stop a command. Before there is anything to save, Ctrl-C prints one line and exits with status 130, as a shell does after
SIGINT; a run in progress counts the signals.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from asyncmoe.errors import Interrupted

NOTHING_BEGUN = "stopped before the command began; repeat it"
NO_RUN_YET = "stopped before the run was started; repeat the command to start it"


@contextmanager
def leaving(said: str) -> Iterator[None]:
    """Within the block, which only imports, Ctrl-C prints `said` and ends the process at once.

    A KeyboardInterrupt may get lost in an import: extension modules turn it into an ImportError, and Python ignores it in a finalizer.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{said}\n".encode())
        os._exit(Interrupted.exit_code)

    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, as in a shell's background job
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stopping(said: str) -> Iterator[None]:
    """Convert Ctrl-C within the block to `Interrupted`, after the block has cleaned up.

    Raises:
        Interrupted: SIGINT was received; the text is `said`.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(said) from None


class StopOnSignal:
    """Counts SIGINT, SIGTERM and SIGHUP, so that none ends the program at an arbitrary point before the user insists.

    After SIGHUP, output to the lost terminal is dropped, because writes would fail. SIGHUP stays ignored if it already is (nohup).

    Attributes:
        count: signals so far. Each from the third on raises KeyboardInterrupt, which breaks off a wait for processes that do not end.
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
