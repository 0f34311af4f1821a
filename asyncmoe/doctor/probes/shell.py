"""Running a command that may be missing, fail, or never end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_REAP_S = 1.0


@dataclass(frozen=True)
class Output:
    """What a command did.

    Attributes:
        text, errors: its standard output and error; what there was of them, where it did not end well.
        trouble: why it could not be run, was ended, or failed; None: status 0.
    """

    text: str
    errors: str = ""
    trouble: str | None = None


def last_line(text: str) -> str:
    """The last that is not empty, not too long to be read."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:300]


def run(command: Sequence[str], seconds: float, given: str = "") -> Output:
    """Run it with `given` on its standard input, for at most so long."""
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
    """Kill it with its children. A process inside a broken driver cannot be killed: it is left alone then."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_REAP_S)
    except subprocess.TimeoutExpired:
        return "", ""


def _failure(name: str, status: int) -> str | None:
    if status == 0:
        return None
    return f"{name} was ended by {signal.Signals(-status).name}" if status < 0 else f"{name} ended with status {status}"
