"""A child process that is watched, logged, ended with everything it started, and that does not outlive us."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import Signals

from asyncmoe.errors import AsyncmoeError
from asyncmoe.storage import writing

ERROR_PREFIX = "error: "
KILLED = "a rank was ended by"
"""How the reason of a torchrun begins of which a signal ended a rank."""
_PR_SET_PDEATHSIG = 1
_YIELDING = 10
"""Niceness: about a tenth of the time that a thread of 0 gets beside it."""


@contextmanager
def named(role: str) -> Iterator[None]:
    """Within the block, this process is `role` of a run ("trainer.3"): an error that leaves it says so, and on which node."""
    try:
        yield
    except AsyncmoeError as error:
        # SLURM may call a node otherwise than it calls itself.
        error.where = error.where or f"{role} on {os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
        raise


def say(error: AsyncmoeError) -> None:
    """Print the one line that is meant for the user; nothing where standard error is a log on a full disk."""
    with suppress(OSError):
        print(f"{ERROR_PREFIX}{error.where}{': ' if error.where else ''}{error}", file=sys.stderr, flush=True)


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def yield_cores() -> None:
    """Let the process's other threads have the cores before the calling one; on Linux a thread has a niceness of its own (sched(7))."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _YIELDING)


class Child:
    """One process in a session of its own, so that Ctrl-C in the terminal reaches only the supervisor.

    Args:
        name: what it is called in messages.
        command: program and arguments.
        log: file its output is appended to.
        environment: variables set on top of ours.

    Raises:
        StorageError: the log cannot be opened.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        with writing(f"log of {name}", log):
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log_start = log.stat().st_size if log.exists() else 0
            opened = log.open("ab")
        with opened as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def pid(self) -> int:
        """Of the process, which is also the number of its session."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative signal number, or None while it runs."""
        return self._process.poll()

    def signal(self, number: Signals) -> None:
        """Send a signal to the process alone; nothing when it has ended."""
        if self.returncode is None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """True when it ended within `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, grace_s: float) -> None:
        """SIGTERM, then after `grace_s` SIGKILL, to the whole session it leads; without a grace it is not asked first."""
        asked = [(signal.SIGTERM, grace_s)] if grace_s else []
        for number, seconds in (*asked, (signal.SIGKILL, 10.0)):
            if not self._signal_session(number) or self._session_gone(seconds):
                return

    @property
    def reason(self) -> str | None:
        """The reason it reported: of its lines `error: ...` the one about a rank that a signal ended, else the first."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        errors = [line.removeprefix(ERROR_PREFIX) for line in text.splitlines() if line.startswith(ERROR_PREFIX)]
        return next((error for error in errors if error.startswith(KILLED)), errors[0] if errors else None)

    def why(self) -> str:
        """The reason it gave for ending, or else where to look."""
        return self.reason or f"{self.name} ended with status {self.returncode}; its log is {self.log}"

    def _signal_session(self, number: Signals) -> bool:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _session_gone(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._process.poll()
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False
