"""A kernel that refuses what a run can do without: `python -m tests.system.refusing PROGRAM ...` executes the program under a filter."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

from asyncmoe.rollout.episodes.tools import guard, seccomp

REFUSED = {"memfd_create", "setpriority", "sched_setaffinity", "ptrace", "unshare", "setns", "mount", "pidfd_open", "io_uring_setup"}


def program() -> bytes:
    """The filter, as `asyncmoe.rollout.episodes.tools.seccomp` explains: the calls above, and PR_SET_PDEATHSIG."""
    machine, no = platform.machine(), seccomp._refuse(errno.EPERM)
    made = [seccomp._do(seccomp._LOAD, seccomp._NUMBER_AT)]
    for name, number in (seccomp._REFUSED[machine] | seccomp._REFUSED_EVERYWHERE).items():
        made += seccomp._when(seccomp._EQUAL, number, no) if name in REFUSED else []
    made += [seccomp._jump(seccomp._EQUAL, seccomp._PRCTL[machine], 0, 3), seccomp._do(seccomp._LOAD, seccomp._FIRST_ARGUMENT_AT)]
    made += seccomp._when(seccomp._EQUAL, seccomp._SET_PARENT_DEATH_SIGNAL, no)
    return b"".join((*made, seccomp._do(seccomp._RETURN, seccomp._ALLOW)))


if __name__ == "__main__":
    instructions = program()
    filtered = guard._Filter(len(instructions) // 8, instructions)
    guard._prctl(guard._PR_SET_SECCOMP, guard._SECCOMP_MODE_FILTER, ctypes.addressof(filtered))
    os.execv(sys.argv[1], sys.argv[1:])
