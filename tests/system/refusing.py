"""A kernel that refuses optional system calls: `python -m tests.system.refusing PROGRAM ...` executes the program under a filter.

The filter is a classic BPF program over `struct seccomp_data` (linux/seccomp.h, linux/filter.h). Numbers are those of Linux's tables
(arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

REFUSED = {
    "x86_64": {
        "memfd_create": 319,
        "setpriority": 141,
        "sched_setaffinity": 203,
        "ptrace": 101,
        "unshare": 272,
        "setns": 308,
        "mount": 165,
    },
    "aarch64": {"memfd_create": 279, "setpriority": 140, "sched_setaffinity": 122, "ptrace": 117, "unshare": 97, "setns": 268, "mount": 40},
}
EVERYWHERE = {"pidfd_open": 434, "io_uring_setup": 425}
PRCTL = {"x86_64": 157, "aarch64": 167}
SET_PDEATHSIG, SET_SECCOMP, MODE_FILTER = 1, 22, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER_AT, ARGUMENT_AT = 0, 16
ALLOW, NO = 0x7FFF0000, 0x00050000 | errno.EPERM


class Filter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("count", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def program() -> bytes:
    """The filter: the calls above, and PR_SET_PDEATHSIG."""
    machine = platform.machine()
    made = [(LOAD, 0, 0, NUMBER_AT)]
    for number in {**REFUSED[machine], **EVERYWHERE}.values():
        made += [(EQUAL, 0, 1, number), (RETURN, 0, 0, NO)]
    made += [(EQUAL, 0, 3, PRCTL[machine]), (LOAD, 0, 0, ARGUMENT_AT), (EQUAL, 0, 1, SET_PDEATHSIG), (RETURN, 0, 0, NO)]
    return b"".join(struct.pack("=HBBI", *one) for one in [*made, (RETURN, 0, 0, ALLOW)])


if __name__ == "__main__":
    instructions = program()
    filtered, libc = Filter(len(instructions) // 8, instructions), ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_SECCOMP, MODE_FILTER, ctypes.c_ulong(ctypes.addressof(filtered)), 0, 0):
        raise OSError(ctypes.get_errno(), "no filter")
    os.execv(sys.argv[1], sys.argv[1:])
