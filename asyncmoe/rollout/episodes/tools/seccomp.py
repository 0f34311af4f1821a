"""The system calls that code in the sandbox may not make, as a Linux seccomp filter.

A filter is a classic BPF program over `struct seccomp_data` (linux/seccomp.h, linux/filter.h) with eight bytes per instruction: `u16 code,
u8 jump_true, u8 jump_false, u32 k`. System call numbers come from Linux's tables (arch/x86/entry/syscalls/syscall_64.tbl,
include/uapi/asm-generic/unistd.h). Refused calls fail with EPERM, so the code sees an exception.
"""

from __future__ import annotations

import errno
import platform
import struct

from asyncmoe.errors import ConfigError

_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
_CLONE_THREAD = 0x00010000
_SOCKET_KINDS, _STREAM = 0xF, 1
"""Bits of a socket's type (include/linux/net.h), and SOCK_STREAM."""
_X32 = 0x40000000
"""System call numbers from here on belong to x86's x32 ABI; other machines have none in this range."""

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_PRCTL = {"x86_64": 157, "aarch64": 167}
_SET_PARENT_DEATH_SIGNAL = 1
_SOCKET_PAIR = {"x86_64": 53, "aarch64": 199}
_REFUSED: dict[str, dict[str, int]] = {
    # No other process, no network, no signal to or inspection of another process, no change of namespaces, mounts or keys, no memory that
    # no limit counts, no log of the kernel.
    "x86_64": {
        **{"fork": 57, "vfork": 58, "socket": 41, "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129},
        **{"rt_tgsigqueueinfo": 297, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "unshare": 272, "setns": 308},
        **{"mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323},
        **{"add_key": 248, "request_key": 249, "keyctl": 250, "setpriority": 141, "sched_setaffinity": 203, "shmget": 29, "msgget": 68},
        **{"semget": 64, "mq_open": 240, "memfd_create": 319, "io_setup": 206, "connect": 42, "bind": 49, "listen": 50, "syslog": 103},
        **{"setsockopt": 54},
    },
    "aarch64": {
        **{"socket": 198, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "ptrace": 117},
        **{"process_vm_readv": 270, "process_vm_writev": 271, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41},
        **{"chroot": 51, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217, "request_key": 218, "keyctl": 219},
        **{"setpriority": 140, "sched_setaffinity": 122, "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180, "memfd_create": 279},
        **{"io_setup": 0, "connect": 203, "bind": 200, "listen": 201, "syslog": 116, "setsockopt": 208},
    },
}
_REFUSED_EVERYWHERE = {
    **{"pidfd_send_signal": 424, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "pidfd_open": 434},
    **{"pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447, "statmount": 457, "listmount": 458},
}
_ATTRIBUTES: dict[str, dict[str, int]] = {
    # What changes a file, or its mode, owner, times or attributes, and which Landlock does not govern (landlock(7), "Known limitations").
    "x86_64": {
        **{"truncate": 76, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "utime": 132, "setxattr": 188},
        **{"lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "utimes": 235},
        **{"fchownat": 260, "futimesat": 261, "fchmodat": 268, "utimensat": 280},
    },
    "aarch64": {
        **{"truncate": 45, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "utimensat": 88, "setxattr": 5, "lsetxattr": 6},
        **{"fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16},
    },
}
_ATTRIBUTES_EVERYWHERE = {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "file_setattr": 469}


def program(machine: str = platform.machine(), *, attributes: bool = True) -> bytes:
    """Return the filter for this machine.

    The code may start threads but no processes: `clone3` fails with ENOSYS, so that libc falls back to `clone`, whose flags a filter can
    read. It keeps the signal that ends it with its parent. Its only sockets are connected pairs of streams (asyncio needs one): a socket of
    datagrams could send to any address, and one with a larger buffer (`setsockopt`) could hold hundreds of megabytes.

    Args:
        attributes: whether the code may change modes, owners, times and extended attributes of the files that it reaches.

    Raises:
        ConfigError: this module has no system call numbers for the machine.
    """
    if machine not in _MACHINES:
        raise ConfigError("tools python", got=f"a {machine} machine", expected=" or ".join(_MACHINES))
    body = [
        _do(_LOAD, _MACHINE_AT),
        *_unless(_EQUAL, _MACHINES[machine], _KILL),
        _do(_LOAD, _NUMBER_AT),
        *_when(_AT_LEAST, _X32, _refuse(errno.EPERM)),
        *_when(_EQUAL, _CLONE3, _refuse(errno.ENOSYS)),
    ]
    refused = {*_REFUSED[machine].values(), *_REFUSED_EVERYWHERE.values()}
    if not attributes:
        refused |= {*_ATTRIBUTES[machine].values(), *_ATTRIBUTES_EVERYWHERE.values()}
    for number in sorted(refused):
        body += _when(_EQUAL, number, _refuse(errno.EPERM))
    # Each of the four checks ends the program if it matches, because it overwrites the loaded system call number.
    body += [_jump(_EQUAL, _PRLIMIT[machine], 0, 4), _do(_LOAD, _FIRST_ARGUMENT_AT)]
    body += [_jump(_EQUAL, 0, 1, 0), _do(_RETURN, _refuse(errno.EPERM)), _do(_RETURN, _ALLOW)]
    body += [_jump(_EQUAL, _PRCTL[machine], 0, 4), _do(_LOAD, _FIRST_ARGUMENT_AT)]
    body += [_jump(_EQUAL, _SET_PARENT_DEATH_SIGNAL, 0, 1), _do(_RETURN, _refuse(errno.EPERM)), _do(_RETURN, _ALLOW)]
    body += [_jump(_EQUAL, _SOCKET_PAIR[machine], 0, 5), _do(_LOAD, _SECOND_ARGUMENT_AT), _do(_AND, _SOCKET_KINDS)]
    body += [_jump(_EQUAL, _STREAM, 1, 0), _do(_RETURN, _refuse(errno.EPERM)), _do(_RETURN, _ALLOW)]
    body += [_jump(_EQUAL, _CLONE[machine], 0, 3), _do(_LOAD, _FIRST_ARGUMENT_AT)]
    body += [_jump(_ANY_BIT, _CLONE_THREAD, 1, 0), _do(_RETURN, _refuse(errno.EPERM)), _do(_RETURN, _ALLOW)]
    return b"".join(body)


def _refuse(number: int) -> int:
    return _ERROR | number


def _do(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, when: int, otherwise: int) -> bytes:
    return struct.pack("=HBBI", code, when, otherwise, value)


def _when(code: int, value: int, result: int) -> list[bytes]:
    return [_jump(code, value, 0, 1), _do(_RETURN, result)]


def _unless(code: int, value: int, result: int) -> list[bytes]:
    return [_jump(code, value, 1, 0), _do(_RETURN, result)]
