"""Calls and commands that may hang, such as on an unresponsive file system, name server or driver, each with a timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncmoe.errors import WaitTimeout

T = TypeVar("T")
_REAP_S = 1.0


class Later(Generic[T]):
    """Runs `work` in a daemon thread, which does not prevent the process from exiting."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self, whom: str, what: str, seconds: float) -> T:
        """Return the result of `work`, or raise its exception.

        Raises:
            WaitTimeout: `work` did not finish in time.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise WaitTimeout(whom, what, seconds)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001  re-raised by `result`
            self._error = error


@dataclass(frozen=True)
class Output:
    """The outcome of a command.

    Attributes:
        text, errors: standard output and error, possibly partial after a failure.
        trouble: why the command could not be run, was killed, or failed; None for status 0.
    """

    text: str
    errors: str = ""
    trouble: str | None = None


def last_line(text: str) -> str:
    """Return the last nonempty line, cut to 300 characters."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:300]


def run(command: Sequence[str], seconds: float, given: str = "") -> Output:
    """Run a command, which may be missing or fail, with `given` on standard input, and kill it after `seconds`."""
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        return Output("", trouble=f"there is no {command[0]}")
    except OSError as error:
        return Output("", trouble=f"{command[0]} cannot be run: {error.strerror}")
    try:
        text, errors = process.communicate(given, timeout=seconds)
    except subprocess.TimeoutExpired:
        text, errors = _end(process)
        return Output(text, errors, f"{command[0]} did not end within {seconds:.0f} s")
    return Output(text, errors, _failure(command[0], process.returncode))


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill a process with its children. A process blocked in a broken driver cannot be killed and is abandoned."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_REAP_S)
    except subprocess.TimeoutExpired:
        return "", ""


def _failure(name: str, status: int) -> str | None:
    if status == 0:
        return None
    return f"{name} was ended by {signal.Signals(-status).name}" if status < 0 else f"{name} ended with status {status}"
