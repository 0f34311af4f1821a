"""Runs a program and ends it with all its descendants: `python -I -S reaper.py PARENT BYTES PROGRAM [ARGUMENT ...]`.

Runs standalone, without asyncmoe on its path. PARENT is the id of the process that asks. The program has this process's standard streams
and environment. When it ends, when SIGTERM arrives, or when PARENT ends, every process that it started is killed, also those that left its
session, because orphans come to this process (PR_SET_CHILD_SUBREAPER, prctl(2)). The exit status is the program's; 128 + n for signal n.
Of what they write to standard error, BYTES are passed on; 0: all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PAUSE_S = 0.005
NOT_FOUND = 127
"""Status if the program cannot be executed."""


def main(parent: int, most: int, command: list[str]) -> int:
    """Run the command. Returns the exit status."""
    ending: list[int] = []
    program = 0

    def end(number: int, frame: FrameType | None) -> None:
        ending.append(number)
        if program:
            os.kill(program, signal.SIGKILL)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, end)
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_PDEATHSIG, signal.SIGTERM), (_PR_SET_CHILD_SUBREAPER, 1)):
        if libc.prctl(option, value, 0, 0, 0) < 0:
            # It protects nobody from the program; what is left of one that was killed is not.
            print(f"prctl {option}: {os.strerror(ctypes.get_errno())}; processes may be left behind", file=sys.stderr, flush=True)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM
    said, saying = os.pipe()
    program = os.fork()
    if program == 0:
        os.dup2(saying if most else 2, 2)
        _execute(libc, command)
    os.close(saying)
    passing = threading.Thread(target=_pass_on, args=(said, most, " ".join(command)[-200:]), daemon=True)
    passing.start()
    for stream in (0, 1):  # otherwise nobody sees that the program has closed its own
        os.close(stream)
    # Until it is waited for, the program's id stays its own, so the handler kills no other process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    _kill_orphans()
    passing.join()
    return status if status >= 0 else 128 - status


def _pass_on(said: int, most: int, name: str) -> None:
    """Copy at most so many bytes from a pipe to standard error; read on until its writers have ended, so that none waits."""
    left = most
    with open(said, "rb", buffering=0) as pipe:
        while some := pipe.read(1 << 16):
            os.write(2, some[:left])
            if 0 < left <= len(some):
                os.write(2, f"\n{name} has written {most} bytes to standard error; the rest is dropped\n".encode())
            left = max(left - len(some), 0)


def _execute(libc: ctypes.CDLL, command: list[str]) -> None:
    """Execute the command in this forked process; never returns."""
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(NOT_FOUND)


def _kill_orphans() -> None:
    """Kill the children of this process until it has none: those of a killed process become its own."""
    while True:
        for process in _children():
            os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_PAUSE_S)


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # proc(5): the fields after the command's name, which may hold any character, begin with state and parent.
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
