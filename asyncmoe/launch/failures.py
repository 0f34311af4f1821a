"""Which of several failed processes is the root cause, and the error that says so."""

from __future__ import annotations

from collections.abc import Sequence
from signal import Signals

from asyncmoe import storage
from asyncmoe.errors import RECURRING, AsyncmoeError, UserError
from asyncmoe.launch.run_processes import Process
from asyncmoe.process import KILLED

_FOLLOWS = ("waited", "was ended by the controller")
"""Words in the reason of a process that failed because it lost another one."""
_MAY_FOLLOW_A_CRASH = (*_FOLLOWS, "no engine is left")
"""Words in the controller's reason that the crash of a rank can cause: engines that receive its weights can fail with it."""
_CRASHES = (Signals.SIGSEGV, Signals.SIGBUS, Signals.SIGABRT, Signals.SIGFPE, Signals.SIGILL)
"""Signals that a process raises by a fault of its own, in contrast to those that another process or the kernel sends it."""
_KILL, _UNEXPLAINED, _LOST = 1, 6, 7
"""Sort keys (`_rank`) of a kill, of a failure without a reason, and of one that the loss of another process explains."""


def failure(failed: Sequence[Process]) -> AsyncmoeError:
    """Return the error of the root-cause failure, with its exit code if the failure would recur. `failed` must not be empty."""
    first = min(failed, key=_rank)
    if first.reason is None and (full := storage.probe(first.log.parent)) is not None:  # a full disk keeps reasons out of the logs
        named = storage.explain(full, f"log of {first.name}, which ended with status {first.returncode}", first.log)
        return named or AsyncmoeError(str(full))
    error = AsyncmoeError(first.why())
    error.exit_code = first.returncode if first.returncode in RECURRING else AsyncmoeError.exit_code
    return error


def explained(failed: Sequence[Process]) -> bool:
    """Whether a failure among them has a reason of its own."""
    return min(map(_rank, failed)) < _UNEXPLAINED


def certain(failed: Sequence[Process]) -> bool:
    """Whether a failure among them does not follow from that of another process which has not ended yet: a user error, or a kill."""
    return min(map(_rank, failed)) <= _KILL


def only_lost(failed: Sequence[Process]) -> bool:
    """Whether all failures are the loss of another process."""
    return all(_rank(process) == _LOST for process in failed)


def _rank(ended: Process) -> int:
    """Sort key of a failure: a user error with its reason is lowest, then a kill, the controller's own reason, wrong numbers or programs, a
    crash, another own reason, no reason, and the loss of another process.

    The controller's own reason precedes a crash, because a rank may crash while it ends for lack of a controller; a kill has another cause.
    """
    status, reason = ended.returncode, ended.reason or ""
    if status == UserError.exit_code and reason:  # a full disk keeps reasons out of logs, perhaps not all of them
        return 0
    if (status is not None and status < 0) or reason.startswith(KILLED):
        named = reason.startswith(tuple(f"{KILLED} {number.name}" for number in _CRASHES))
        return 4 if named or (not reason.startswith(KILLED) and -(status or 0) in _CRASHES) else _KILL
    if not reason:
        return _UNEXPLAINED
    if ended.name.split()[0] == "controller" and not any(words in reason for words in _MAY_FOLLOW_A_CRASH):
        return 2
    if status in RECURRING:
        return 3
    return _LOST if any(words in reason for words in _FOLLOWS) else 5
