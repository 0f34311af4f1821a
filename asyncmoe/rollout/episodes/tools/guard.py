"""Confines a program, runs it, ends it and reports how it ended: `python -I -S guard.py SETTINGS` with the program on standard input.

The guard runs standalone, without asyncmoe on its path. SETTINGS is a JSON object: `parent` process id (null: it has another number inside
a container), `program` (command), `file` that receives the input, `environment`, `wall_s`, `rlimits` (number -> soft and hard), `seccomp`
(hexadecimal, `asyncmoe.rollout.episodes.tools.seccomp`), `root` and `landlock`. `root` is null or an object: `bound` {path inside: path
outside} and `hidden` (`asyncmoe.rollout.episodes.tools.sandboxes.python_files`), `work` (the program's directory) and `disk_bytes`. With
`landlock` the program stays in this process's root, and `root` says what it may read there. The program's output, errors included, goes to
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
import stat
import struct
import sys

TYPE_CHECKING = False  # a guard starts for every call, and `typing` would take a tenth of its time
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 4, 24, 38, 22, 2
_NEW_USER, _NEW_MOUNTS, _NEW_PIDS, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x20000, 0x20000000, 0x40000000, 0x08000000
_NEW_NAME, _NEW_CGROUP = 0x04000000, 0x02000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 1, 2, 4, 0x1000, 0x4000, 0x40000, 2
_SYS_CLOSE_RANGE, _SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_BYTES = 436, 442, -100, 0x8000, 32
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAP_SETIDS = 1 << 6 | 1 << 7
"""CAP_SETGID and CAP_SETUID."""
_NOBODY, _INSIDE_ID = 65534, 1000
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _READ_FILE, _READ_DIRECTORY = 1, 4, 8
_LANDLOCK_RIGHTS = (13, 14, 15, 15, 16)
"""How many access rights versions 1, 2, ... of Landlock know."""
_WRITING = 0x75BE
"""What the program may do in its directory: everything but executing files, and making devices and sockets."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main(settings: dict[str, Any]) -> None:
    """Run the program on standard input."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if settings["parent"] not in (None, os.getppid()):
        sys.exit("the process that asked has ended")
    _check(_libc.syscall(_SYS_CLOSE_RANGE, 3, ctypes.c_uint(0xFFFFFFFF), 0), "close_range")
    program = sys.stdin.buffer.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if settings["root"] is not None and not settings["landlock"]:
        _enter_root(settings["root"], os.getcwd())
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # another user's process has to ask again
        if settings["parent"] not in (None, os.getppid()):
            sys.exit("the process that asked has ended")
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
        if settings["landlock"]:
            _restrict(settings["root"])
        instructions = bytes.fromhex(settings["seccomp"])
        filtered = _Filter(len(instructions) // 8, instructions)
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filtered))
        os.execve(settings["program"][0], settings["program"], settings["environment"])
    except BaseException:  # noqa: BLE001  reported to the controller; a forked process must not continue as if it were the guard
        sys.stderr = report
        sys.__excepthook__(*sys.exc_info())  # without the module traceback, which takes as long to load
        report.flush()
    finally:
        os._exit(1)


def _enter_root(root: dict[str, Any], directory: str) -> None:
    """Enter new namespaces, whose root has what `root` names and an empty directory in memory, and nothing else of this machine.

    Mounts that are made read-only here stay read-only whatever the program does: after `execve` as a non-root user, it has no capability in
    this user namespace, and in a user namespace that it might open, these mounts are locked (mount_namespaces(7)).
    """
    nobody = _new_user_namespace()
    _check(_libc.sethostname(b"sandbox", 7), "sethostname")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    owner = f"uid={_INSIDE_ID},gid={_INSIDE_ID}"
    _mount(b"none", directory, b"tmpfs", _MS_NOSUID | _MS_NODEV, f"size=64k,nr_inodes=1024,mode=755,{owner}")
    os.chdir(directory)
    # Opened with the rights of the guard's user: another one may not be able to reach a Python in a home.
    sources = {inside: os.open(outside, os.O_PATH) for inside, outside in root["bound"].items()}
    if nobody:
        os.setgroups([])
        os.setresgid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
        os.setresuid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
    for inside, source in sources.items():
        _bind(source, f".{inside}")
    for covered in root["hidden"]:
        _mount(b"none", f".{covered}", b"tmpfs", _MS_NOSUID | _MS_NODEV, "size=4k,mode=555")
    for place in ("./proc", f".{root['work']}"):
        os.mkdir(place)
    attributes = (ctypes.c_uint64 * 4)(_MS_RDONLY | _MS_NOSUID | _MS_NODEV, 0, 0, 0)
    locked = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b".", _AT_RECURSIVE, ctypes.byref(attributes), _ATTR_BYTES)
    _check(locked, "mount_setattr")
    inside = f"size={root['disk_bytes']},nr_inodes=4096,mode=700"
    _mount(b"none", f".{root['work']}", b"tmpfs", _MS_NOSUID | _MS_NODEV, inside)
    # pivot_root(2), "pivot_root(".", ".")": the old root lies on the new one, until it is detached.
    _check(_libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir(root["work"])


def _new_user_namespace() -> bool:
    """Enter new user, mount, process, network, IPC, host name and cgroup namespaces; one user and one group are mapped, to `_INSIDE_ID`.

    It is this process's own user, or nobody for a root that may become any user: what is root's is then not the program's, and root's
    processes are not limited in number. Returns True if it is nobody.
    """
    nobody = os.geteuid() == 0 and _may_be_nobody()
    user, group = (_NOBODY, _NOBODY) if nobody else (os.geteuid(), os.getegid())
    maps = {"uid_map": f"{_INSIDE_ID} {user} 1", "gid_map": f"{_INSIDE_ID} {group} 1"}
    if not nobody:
        _unshare()
        _write("/proc/self", {"setgroups": "deny", **maps})
        return False
    # A process of the namespace outside writes the maps: inside, there is no right to another user of the outside.
    begin, begun = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(begun)
            if os.read(begin, 1):
                _write(f"/proc/{os.getppid()}", maps)
            os._exit(0)
        finally:
            os._exit(1)
    try:
        _unshare()
        os.write(begun, b"x")
    finally:
        os.close(begun)
        os.close(begin)
        _, status = os.waitpid(helper, 0)
    if status != 0:
        raise OSError(1, "the kernel refuses to map the user nobody")
    return True


def _may_be_nobody() -> bool:
    """Return whether this root has the capabilities to become the user nobody, and its user namespace has one."""
    with open("/proc/self/status") as file:
        capabilities = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    return capabilities & _CAP_SETIDS == _CAP_SETIDS and all(_has_nobody(f"/proc/self/{name}") for name in ("uid_map", "gid_map"))


def _has_nobody(name: str) -> bool:
    with open(name) as file:
        ranges = [[int(number) for number in line.split()] for line in file]
    return any(first <= _NOBODY < first + count for first, _, count in ranges)


def _unshare() -> None:
    everything = _NEW_USER | _NEW_MOUNTS | _NEW_PIDS | _NEW_NETWORK | _NEW_IPC | _NEW_NAME | _NEW_CGROUP
    _check(_libc.unshare(everything), "unshare")


def _write(directory: str, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        with open(f"{directory}/{name}", "w") as file:
            file.write(text)


def _mount(source: bytes | None, target: str, kind: bytes | None, flags: int, options: str = "") -> None:
    _check(_libc.mount(source, os.fsencode(target), kind, flags, options.encode()), f"mount {target}")


def _bind(source: int, target: str) -> None:
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(f"/proc/self/fd/{source}".encode(), target, None, _MS_BIND | _MS_REC)
    os.close(source)


def _restrict(root: dict[str, Any]) -> None:
    """Let this thread read what `root` names and write in `root["work"]`, by Landlock, and reach the content of no other file.

    The access rights are those of linux/landlock.h; the kernel's version says how many of them it knows.
    """
    version = _libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    _check(version, "landlock_create_ruleset")
    rights = (1 << _LANDLOCK_RIGHTS[min(version, len(_LANDLOCK_RIGHTS)) - 1]) - 1
    rules = _libc.syscall(_LANDLOCK_CREATE, ctypes.byref(ctypes.c_uint64(rights)), 8, 0)
    _check(rules, "landlock_create_ruleset")
    for path, allowed in _allowed(root):
        handle = os.open(path, os.O_PATH)
        of_files = 0 if stat.S_ISDIR(os.fstat(handle).st_mode) else _READ_DIRECTORY
        beneath = struct.pack("=Qi", rights & allowed & ~of_files, handle)
        _check(_libc.syscall(_LANDLOCK_ADD, rules, 1, beneath, 0), f"landlock_add_rule {path}")
        os.close(handle)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allowed(root: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield files and directories, and what is allowed there. Of a hidden directory, names can be listed: Landlock knows no exceptions."""
    yield root["work"], _WRITING
    hidden = [os.path.realpath(path) for path in root["hidden"]]
    for path in root["bound"].values():
        covered = [one for one in hidden if os.path.dirname(one) == path]
        if covered:
            yield path, _READ_DIRECTORY
        inside = [one.path for one in os.scandir(path) if one.path not in covered] if covered else [path]
        for one in inside:
            yield one, _EXECUTE | _READ_FILE | _READ_DIRECTORY


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
