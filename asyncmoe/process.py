"""Child processes: logged, watched, ended together with their descendants, and killed when this process ends."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

from asyncmoe.errors import AsyncmoeError, Interrupted, UserError
from asyncmoe.storage import writing

ERROR_PREFIX, WARNING = "error: ", "warning: "
_LOOK_S = 0.05
KILLED = "a rank was ended by"
"""Prefix of the failure reason if a signal ended one of torchrun's ranks."""
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(10), *range(11, 32), *range(127, 160))}
"""Control characters except the line feed, which separates several errors."""
_PR_SET_PDEATHSIG = 1
_REAP_S = 60.0
_MOST_READ = 64 << 20
_YIELDING = 10
"""Added niceness: a thread with it gets about a tenth of the CPU time of a competing thread with niceness 0."""


def signalled(status: int) -> str:
    """Return the signal that ended a process with this negative status, and its likely cause."""
    return f"{Signals(-status).name}{likely(status)}"


def likely(status: int | None) -> str:
    """Return the likely cause of a process's end with this status, if it tells; else an empty string."""
    return ", as when memory runs out" if status == -signal.SIGKILL else ""


@contextmanager
def named(role: str) -> Iterator[None]:
    """Name this process `role` ("trainer.3") within the block: an error that leaves the block carries the role and the node."""
    try:
        yield
    except AsyncmoeError as error:
        # SLURM's name of a node may differ from its host name.
        error.where = error.where or f"{role} on {os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
        raise


def keep_files() -> None:
    """Keep child processes from inheriting the files that this process has inherited: uvloop closes none of them."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the directory itself
            if number > 2:
                os.set_inheritable(number, False)


def say(error: AsyncmoeError) -> None:
    """Print the error for the user, with control characters of foreign texts escaped, and the number of errors if several.
    `Interrupted` gets no prefix."""
    prefix = "" if isinstance(error, Interrupted) else ERROR_PREFIX
    count = str(error).count("\n") + 1
    told = f"{error}\n{count} errors" if isinstance(error, UserError) and count > 1 else error
    with suppress(OSError):  # the log's disk is full, which the parent checks
        print(f"{prefix}{error.where}{': ' if error.where else ''}{told}".translate(_ESCAPED), file=sys.stderr, flush=True)


class _Unbroken(io.FileIO):
    def write(self, data: Any) -> int:
        with suppress(OSError):
            if (written := super().write(data)) is not None:
                return written
        return memoryview(data).nbytes


def unbroken_output() -> None:
    """Ignore failed writes to standard output and error from now on: a run continues without a reader of its output, and on a full disk.
    The run's files have all that is printed."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None and stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Unbroken(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True))


def leave(status: int) -> NoReturn:
    """End this process at once, without the interpreter's shutdown.

    After a failure the interpreter would wait: other ranks may wait for this rank in a collective, and our own threads for a reply.
    After a success it may abort: a thread of Gloo that still holds a tensor takes the interpreter's lock, and a finalizing interpreter
    aborts with "terminate called without an active exception" (torch/csrc/PyInterpreter.cpp, pytorch/pytorch#179291).
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the shell
        with suppress(OSError):  # the disk of the log may be full
            stream.flush()
    os._exit(status)


def die_with_parent(parent: int | None = None, how: Signals = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when its parent ends for any reason.

    Args:
        parent: process id of the parent, if known: this process ends at once if its parent has already ended.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, how, 0, 0, 0) != 0:
        print("prctl(PR_SET_PDEATHSIG) is refused: this process does not end with its parent", file=sys.stderr, flush=True)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + how)


def freeze() -> None:
    """Exempt all objects made so far from garbage collection. Call it once, when a process has loaded what it keeps to its end.

    The packages of a trainer or controller make over a million objects; each collection of the oldest generation would walk over them,
    which stops every thread of the process for about 0.25 s, every few steps of a small model (`gc.freeze` in Python's documentation).
    """
    gc.collect()
    gc.freeze()
    # CPython 3.11 (Modules/gcmodule.c) collects the oldest generation once the objects waiting for it exceed a quarter of those that the
    # last such collection left: without this one, cycles that outlive two young collections would stay until there are hundreds of
    # thousands of objects.
    gc.collect()


def yield_cores() -> None:
    """Give the other threads of the process priority over the calling thread; on Linux each thread has its own niceness (sched(7))."""
    thread = threading.get_native_id()
    with suppress(OSError):  # a filter of system calls may refuse it
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _YIELDING)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until `condition` holds; return false after `seconds`."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True


class Child:
    """One process in its own session, so that Ctrl-C in the terminal reaches only the supervisor.

    Args:
        name: name of the process in messages.
        command: program and arguments.
        log: file to which its output is appended.
        environment: variables added to this process's environment.

    Raises:
        StorageError: the log cannot be opened.
        AsyncmoeError: the system cannot start the process.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        with writing(f"log of {name}", log):
            log.parent.mkdir(parents=True, exist_ok=True)
            opened = log.open("ab")
        with opened as output:
            self._begin = output.tell()
            try:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            except OSError as error:
                raise AsyncmoeError(f"{name}: {command[0]} cannot be started: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Process id, which is also the session id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative signal number, or None while the process runs."""
        return self._process.poll()

    def signal(self, number: Signals) -> None:
        """Send a signal to the process alone, if it still runs."""
        if self.returncode is None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Wait for the process. Returns whether it ended within `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.returncode is not None

    def kill(self) -> None:
        """Send SIGKILL to the whole session, without waiting: device memory may take seconds to free. A thread reaps the process."""
        self._signal_session(signal.SIGKILL)
        threading.Thread(target=self.wait, args=(_REAP_S,), name=f"reap {self.name}", daemon=True).start()

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to the whole session, and SIGKILL after `grace_s`; with `grace_s` 0, only SIGKILL."""
        asked = [(signal.SIGTERM, grace_s)] if grace_s else []
        for number, seconds in (*asked, (signal.SIGKILL, 10.0)):
            if not self._signal_session(number) or wait_until(self._is_gone, seconds):
                return

    def output(self) -> str:
        """Return what the process has written to its log, or the newest 64 MiB of it."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = self._begin if self._begin <= size else 0  # it was truncated
            file.seek(max(begin, size - _MOST_READ))
            return file.read().decode(errors="replace")

    @property
    def reason(self) -> str | None:
        """Failure reason: the `error: ...` line in its log about a rank ended by a signal, else the first `error:` line; None: neither."""
        errors = [line.removeprefix(ERROR_PREFIX) for line in self.output().splitlines() if line.startswith(ERROR_PREFIX)]
        return next((error for error in errors if error.startswith(KILLED)), errors[0] if errors else None)

    def why(self) -> str:
        """Return the failure reason; without one, the exit status and the path of the log."""
        return self.reason or f"{self.name} ended with status {self.returncode}{likely(self.returncode)}; its log is {self.log}"

    def _signal_session(self, number: Signals) -> bool:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
            return True
        return False

    def _is_gone(self) -> bool:
        self._process.poll()  # or it stays a zombie
        return not lives(self._process.pid)


def lives(group: int) -> bool:
    """Return whether a process group has a running process. Zombies do not count: process 1 of a container may reap orphans late or
    never."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            state, _, of = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                return True
    return False


def boot_id() -> str:
    """Return the kernel's ID of this host's current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def run_rank(name: str, act: Callable[[], None]) -> NoReturn:
    """Run a command's part in a rank, and end this process: with a line for a user-facing error and its status, else with 0."""
    die_with_parent()
    try:
        with named(name):
            act()
    except AsyncmoeError as error:
        say(error)
        leave(error.exit_code)
    leave(0)
