"""Ctrl-C before there is anything to save: one line, and status 130, as a shell gives a command that SIGINT ended."""

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

    The exception that Python raises otherwise may get lost in an import: extension modules turn it into an ImportError, and Python
    ignores it in a finalizer.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{said}\n".encode())
        os._exit(Interrupted.exit_code)

    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, as of a shell's background job
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stopping(said: str) -> Iterator[None]:
    """Let Ctrl-C within the block end the command in one line, after the block has cleaned up.

    Raises:
        Interrupted: SIGINT was received; the text is `said`.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(said) from None
