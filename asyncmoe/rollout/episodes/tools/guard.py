"""Confines a program, runs it, ends it and reports how it ended: `python -I -S guard.py SETTINGS` with the program on standard input.

The guard runs standalone, without asyncmoe on its path. SETTINGS is a JSON object: `parent` process id (null: it has another number inside
a container), `program` (command), `file` that receives the input, `environment`, `wall_s`, `rlimits` (number -> soft and hard), `seccomp`
(hexadecimal, `asyncmoe.rollout.episodes.tools.seccomp`), `namespaces`, `disk_bytes`. The program's output, errors included, goes to
standard output. When the program has ended, standard error has a line of JSON, `{"status": exit status or negative signal, "cpu_s": ...,
"timeout": ...}`; or, if the program could not run, the reason.

The guard stays outside the sandbox: nothing inside can signal it, and the program ends when the guard does.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 4, 24, 38, 22, 2
_NEW_USER, _NEW_MOUNTS, _NEW_PIDS, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x20000, 0x20000000, 0x40000000, 0x08000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 1, 2, 4, 0x4000, 0x40000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_BYTES = 442, -100, 0x8000, 32
_INSIDE_ID = 1000

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main(settings: dict[str, Any]) -> None:
    """Run the program on standard input."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if settings["parent"] not in (None, os.getppid()):
        sys.exit("the process that asked has ended")
    program = sys.stdin.buffer.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if settings["namespaces"]:
        _enter_namespaces(os.getcwd(), settings["disk_bytes"])
    # Otherwise a program of the same user could write to this process's memory through /proc.
    _prctl(_PR_SET_DUMPABLE, 0)
    with open(settings["file"], "wb") as file:
        file.write(program)
    ending = {signal.SIGTERM, signal.SIGALRM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    child = os.fork()
    if child == 0:
        _start(settings, ending)
    _watch(child, settings["wall_s"], ending)


def _watch(child: int, wall_s: float, ending: set[signal.Signals]) -> None:
    handle = os.pidfd_open(child)
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.pidfd_send_signal(handle, signal.SIGKILL)

    for number in ending:
        signal.signal(number, end)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    _, status, usage = os.wait4(child, 0)
    cpu_s = usage.ru_utime + usage.ru_stime
    ended = {"status": os.waitstatus_to_exitcode(status), "cpu_s": cpu_s, "timeout": signal.SIGALRM in received}
    print(json.dumps(ended), file=sys.stderr)


def _start(settings: dict[str, Any], ending: set[signal.Signals]) -> None:
    """Confine this process and execute the program; runs in a forked child and never returns."""
    report = os.fdopen(os.dup(2), "w")
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
        os.dup2(1, 2)
        if os.geteuid() == 0:
            _drop_capabilities()
        for number, limits in settings["rlimits"].items():
            resource.setrlimit(int(number), tuple(limits))
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        instructions = bytes.fromhex(settings["seccomp"])
        filtered = _Filter(len(instructions) // 8, instructions)
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filtered))
        os.execve(settings["program"][0], settings["program"], settings["environment"])
    except BaseException:  # noqa: BLE001  reported to the controller; a forked process must not continue as if it were the guard
        traceback.print_exc(file=report)
        report.flush()
    finally:
        os._exit(1)


def _enter_namespaces(directory: str, disk_bytes: int) -> None:
    """Enter new user, mount, process, network and IPC namespaces; everything is read-only except `directory`, empty and in memory.

    Mounts that are made read-only here stay read-only whatever the program does: after `execve` as a non-root user, it has no capability in
    this user namespace, and in a user namespace that it might open, these mounts are locked (mount_namespaces(7)).
    """
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEW_USER | _NEW_MOUNTS | _NEW_PIDS | _NEW_NETWORK | _NEW_IPC), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_INSIDE_ID} {user} 1"), ("gid_map", f"{_INSIDE_ID} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")
    attributes = (ctypes.c_uint64 * 4)(_MS_RDONLY | _MS_NOSUID | _MS_NODEV, 0, 0, 0)
    locked = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), _ATTR_BYTES)
    _check(locked, "mount_setattr /")
    flags = _MS_NOSUID | _MS_NODEV
    _check(_libc.mount(b"none", b"/proc", b"tmpfs", flags | _MS_RDONLY, b"size=4k,mode=555"), "mount /proc")
    inside = f"size={disk_bytes},nr_inodes=4096,mode=700".encode()
    _check(_libc.mount(b"none", directory.encode(), b"tmpfs", flags, inside), f"mount {directory}")
    os.chdir(directory)


def _drop_capabilities() -> None:
    """Empty the bounding set: capabilities outside it do not come back when root executes a program."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in range(last + 1):
        _prctl(_PR_CAPBSET_DROP, capability)


def _prctl(option: int, value: int, address: int = 0) -> None:
    arguments = (ctypes.c_ulong(value), ctypes.c_ulong(address), ctypes.c_ulong(0), ctypes.c_ulong(0))
    _check(_libc.prctl(option, *arguments), f"prctl {option}")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
