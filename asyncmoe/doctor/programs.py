"""Run commands that may be missing, fail or hang (on an unresponsive file system or driver), each with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_REAP_S = 1.0


@dataclass(frozen=True)
class Output:
    """The outcome of a command.

    Attributes:
        text, errors: standard output and error, possibly partial after a failure.
        trouble: why the command could not be run, was killed, or failed; None for status 0.
        late: True if it was killed because it did not end in time.
    """

    text: str
    errors: str = ""
    trouble: str | None = None
    late: bool = False


def last_line(text: str) -> str:
    """Return the last nonempty line, cut to 300 characters."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:300]


def run(command: Sequence[str], seconds: float, given: str = "") -> Output:
    """Run a command, which may be missing or fail, with `given` on standard input, and kill it and its children after `seconds`."""
    pipe, name = subprocess.PIPE, command[0]
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True)
    except FileNotFoundError:
        return Output("", trouble=f"there is no {name}")
    except OSError as error:
        return Output("", trouble=f"{name} cannot be run: {error.strerror}")
    try:
        text, errors = process.communicate(given, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Output(*_end(process), f"{name} did not end within {seconds:.0f} s", late=True)
    return Output(text, errors, _failure(name, process.returncode))


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
