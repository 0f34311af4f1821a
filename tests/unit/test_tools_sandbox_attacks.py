"""What a program tries against the default sandbox, and what it gets: in a root of its own, and under Landlock without namespaces."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import seccomp
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes import kernel_support, own, python_tool
from asyncmoe.rollout.episodes.tools.sandboxes.guarded import Guarded
from asyncmoe.rollout.episodes.tools.sandboxes.own import Own
from asyncmoe.rollout.episodes.tools.sandboxes.python_files import python_files
from asyncmoe.rollout.episodes.tools.tool import ToolError

REPOSITORY = Path(__file__).parents[2]


def why_not(namespaces: bool) -> str | None:
    if not sys.platform.startswith("linux"):
        return "not Linux"
    if not namespaces and kernel_support.landlock_version() == 0:
        return "no Landlock here"
    try:
        python_tool(PythonLimits(namespaces=namespaces))
    except ConfigError as error:
        return str(error)
    return None


NO_ROOT, NO_LANDLOCK = why_not(True), why_not(False)
ROOT = pytest.mark.skipif(NO_ROOT is not None, reason=str(NO_ROOT))
LANDLOCK = pytest.mark.skipif(NO_LANDLOCK is not None, reason=str(NO_LANDLOCK))
BOTH = pytest.mark.parametrize("namespaces", [pytest.param(True, marks=ROOT), pytest.param(False, marks=LANDLOCK)])


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "programs").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "programs"))


def run(code: str, namespaces: bool, **limits: float) -> str:
    given = PythonLimits(namespaces=namespaces, **limits)  # type: ignore[arg-type]
    sandbox = Guarded(given, Own(given))
    return asyncio.run(sandbox.run(code.encode())).output


def successes(attempts: Iterable[str], namespaces: bool) -> list[str]:
    """The attempts, lines of code, that raised no OSError in one program."""
    code = "import os\n" + "".join(f"try: {one}\nexcept OSError: pass\nelse: print({one!r})\n" for one in attempts)
    text = run(f"{code}print('end')", namespaces)
    assert text.endswith("end\n"), text
    return text.splitlines()[:-1]


@BOTH
def test_no_file_of_a_run_its_user_or_its_machine_can_be_read(namespaces: bool, tmp_path: Path) -> None:
    run_dir, answers = tmp_path / "runs" / "one" / "rendezvous.json", tmp_path / "train.jsonl"
    run_dir.parent.mkdir(parents=True)
    packages = python_files().hidden
    readable = [run_dir, answers, Path(__file__), Path(own.__file__), Path(pytest.__file__), Path("/etc/passwd"), Path("/proc/1/status")]
    readable += [path for packages_directory in packages for path in Path(packages_directory).rglob("*.py")][:3]
    run_dir.write_text("a key of the run")
    answers.write_text('{"question": "6*7", "answer": "42"}')
    assert all(path.read_bytes() for path in readable)
    secret = ["/etc/shadow", f"/proc/{os.getpid()}/environ", "/proc/self/environ", "/proc/kcore", "/sys/kernel/notes", "/dev/mem"]
    paths = [*map(str, readable), *secret, f"/proc/{os.getpid()}/root/etc/passwd", "/proc/self/root/etc/passwd", f"../../{answers}"]
    paths += [f"../../../../..{answers}", f"/proc/{os.getpid()}/cwd/{answers.name}", f"/work/../{answers}"]
    attempts = [f"open({path!r}, 'rb').read(1)" for path in paths]
    attempts += [f"os.symlink({path!r}, 'l{n}'); open('l{n}', 'rb').read(1)" for n, path in enumerate(paths)]
    attempts += [f"os.link({path!r}, 'h{n}'); open('h{n}', 'rb').read(1)" for n, path in enumerate(paths)]
    attempts += [f"os.open({path!r}, os.O_RDONLY, dir_fd=os.open('/', os.O_PATH))" for path in map(str, readable)]
    listed = [tmp_path, Path.home() / ".ssh", Path.home() / ".cache", "/tmp", "/etc/ssl", "/run", REPOSITORY, Path(pytest.__file__).parent]
    attempts += [f"os.listdir({str(path)!r})" for path in listed]
    assert successes(attempts, namespaces) == []


@ROOT
def test_the_root_has_python_and_nothing_else() -> None:
    code = "import json, os\nprint(json.dumps([f'{place}/{name}' for place, _, names in os.walk('/') for name in names]))"
    text = run(code, True, output_bytes=2**22)
    files = python_files()
    inside = [path for path in json.loads(text) if path != "/work/main.py"]
    assert inside
    others = [path for path in inside if not any(path == one or path.startswith(f"{one}/") for one in files.bound)]
    assert others == []
    assert not [path for path in inside if path.startswith(files.hidden)]
    assert (
        run("import os\nprint(os.uname().nodename, {*os.getgroups()} <= {1000, 65534}, os.listdir('/proc'))", True) == "sandbox True []\n"
    )
    assert run("print('/home/work/x')", True) == "/home/work/x\n"
    # As seen from the standard library: what needs files or libraries besides Python's own.
    code = "import asyncio, bz2, ctypes, decimal, hashlib, lzma, sqlite3, ssl, threading, zoneinfo\nasyncio.run(asyncio.sleep(0))\n"
    code += "ctypes.CDLL('libgcc_s.so.1')\n"
    code += "print(sqlite3.connect(':memory:').execute('select 6*7').fetchone(), hashlib.sha3_256(b'').hexdigest()[:4])"
    assert run(code, True) == "(42,) a7ff\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not Linux")
def test_what_python_needs_holds_no_environment_and_no_home() -> None:
    files = python_files()
    private = [REPOSITORY, Path.home(), Path(sys.prefix), Path("/etc"), Path("/usr"), Path("/usr/lib"), Path("/"), Path("/tmp")]
    assert not {*map(str, private), *(os.path.realpath(path) for path in private)} & {*files.bound, *files.bound.values()}
    assert all(os.path.exists(outside) for outside in files.bound.values())
    with pytest.raises(ConfigError, match=r"tools python: got .*false: status 1, expected a Python"):
        python_files("/bin/false")


@BOTH
def test_nothing_outside_can_be_changed(namespaces: bool, tmp_path: Path) -> None:
    """Root's program too: it owns these files."""
    file = tmp_path / "file"
    file.write_text("as it was")
    os.utime(file, (1, 1))
    before, name = file.stat(), str(file)
    attempts = [f"open({name!r}, {mode!r})" for mode in ("w", "a", "r+")]
    attempts += [f"os.{call}" for call in (f"truncate({name!r}, 0)", f"chmod({name!r}, 0)", f"utime({name!r})", f"remove({name!r})")]
    attempts += [f"os.{call}" for call in (f"setxattr({name!r}, 'user.x', b'')", f"chown({name!r}, 0, 0)", f"rename({name!r}, 'mine')")]
    attempts += [f"os.{call}" for call in (f"rename('main.py', {name!r})", f"mkdir({name + '.d'!r})", f"symlink('x', {name + '.l'!r})")]
    attempts += [f"os.mkfifo({name + '.f'!r})", f"os.link('main.py', {name + '.h'!r})", "os.mkdir('/new')", "open('/proc/new', 'w')"]
    attempts += [f"open({path + '/new'!r}, 'w')" for path in ("/usr/lib", "/lib", "/dev/shm", str(Path(os.__file__).parent))]
    assert successes(attempts, namespaces) == []
    assert file.stat() == before
    assert file.read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "programs"]


SYSTEM_CALLS = (
    *("memfd_create", "memfd_secret", "shmget", "semget", "msgget", "mq_open", "io_setup", "io_uring_setup", "userfaultfd", "ptrace"),
    *("process_vm_readv", "process_vm_writev", "pidfd_open", "pidfd_getfd", "unshare", "setns", "mount", "umount2", "pivot_root", "chroot"),
    *("fsopen", "open_tree", "move_mount", "mount_setattr", "statmount", "listmount", "bpf", "perf_event_open", "syslog", "add_key"),
    *("request_key", "keyctl", "kill", "tkill", "tgkill", "socket", "connect", "bind", "listen", "setsockopt"),
    "sched_setaffinity",
)


@BOTH
def test_system_calls_are_refused(namespaces: bool) -> None:
    """Memory that no limit counts, other processes, keyrings, namespaces and mounts, io_uring, the kernel's log."""
    machine = platform.machine()
    numbers = {**seccomp._REFUSED[machine], **seccomp._REFUSED_EVERYWHERE}
    code = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nc.syscall.argtypes = [ctypes.c_long] * 7\n"
    code += f"for name, n in {[(name, numbers[name]) for name in SYSTEM_CALLS]}:\n"
    code += "  ctypes.set_errno(0)\n  if c.syscall(n, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1: print(name, ctypes.get_errno())"
    assert run(code, namespaces) == ""


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_numbers_of_system_calls_are_the_kernels(machine: str) -> None:
    """The system's own header is the oracle."""
    generic = Path("/usr/include/asm-generic/unistd.h")
    header = generic if machine == "aarch64" else Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip(f"no {header}: apt install linux-libc-dev")
    theirs = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())}
    ours = {
        **seccomp._REFUSED[machine],
        **seccomp._ATTRIBUTES[machine],
        "clone": seccomp._CLONE[machine],
        "prlimit64": seccomp._PRLIMIT[machine],
    }
    ours |= {"prctl": seccomp._PRCTL[machine], "socketpair": seccomp._SOCKET_PAIR[machine], "clone3": seccomp._CLONE3}
    ours |= {name: n for name, n in (seccomp._REFUSED_EVERYWHERE | seccomp._ATTRIBUTES_EVERYWHERE).items() if name in theirs}
    assert ours == {name: theirs.get(name) for name in ours}


@BOTH
def test_a_pair_of_sockets_reaches_no_other(namespaces: bool, tmp_path: Path) -> None:
    """A datagram socket of a pair could send to any path, and without namespaces to any abstract name, of this machine."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as named, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        named.bind(str(tmp_path / "s"))
        abstract.bind(f"\0asyncmoe-{os.getpid()}")
        addresses = [named.getsockname(), abstract.getsockname()]
        attempts = [f"import socket; socket.socketpair(socket.AF_UNIX, {kind})" for kind in ("socket.SOCK_DGRAM", "socket.SOCK_SEQPACKET")]
        attempts += [f"socket.socketpair()[0].sendto(b'x', {address!r})" for address in addresses]
        attempts += [f"socket.socketpair()[0].connect({address!r})" for address in addresses]
        attempts += ["socket.socketpair()[0].bind('x')"]
        attempts += [f"socket.socketpair()[0].sendmsg([b'x'], [], 0, {address!r})" for address in addresses]
        assert successes(attempts, namespaces) == []
        for one in (named, abstract):
            one.settimeout(0)
            with pytest.raises(BlockingIOError):
                one.recv(1)
    assert run("import socket\na, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))", namespaces) == "b'x'\n"


HOLDERS = {
    "pairs of sockets": "a, b = socket.socketpair()\n    held += [a, b]\n    a.setblocking(False)\n    try:\n"
    "      try: a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**24)\n      except PermissionError: pass\n"
    "      while True: n += a.send(bytes(65536))\n    except BlockingIOError: pass",
    "pipes": "r, w = os.pipe()\n    held += [r, w]\n    fcntl.fcntl(w, 1031, 2**20)\n    os.set_blocking(w, False)\n"
    "    n += os.write(w, bytes(2**20))",
    "memfd": "held.append(os.memfd_create('x'))\n    n += os.write(held[-1], bytes(15 * 2**20))",
    "deleted files": "held.append(open('x', 'wb', buffering=0))\n    os.remove('x')\n    n += held[-1].write(bytes(15 * 2**20))",
}


@ROOT
@pytest.mark.parametrize("holder", HOLDERS)
def test_little_memory_is_held_outside_the_address_space(holder: str) -> None:
    """Bytes that a program gets to keep in open files until there are no more."""
    code = f"import fcntl, os, socket\nn, held = 0, []\ntry:\n  while True:\n    {HOLDERS[holder]}\nexcept OSError: print(n, len(held))"
    held, files = map(int, run(code, True).split())
    assert held <= 32 * 2**20
    assert files <= 64


@ROOT
@pytest.mark.skipif(not kernel_support.counts_in_namespaces(), reason="before Linux 5.14 the limit counts all processes of the user")
def test_threads_are_limited_in_number() -> None:
    """A thread with a small stack takes more of the kernel's memory than of its own."""
    code = "import threading, time\nthreading.stack_size(32768)\ntry:\n  for n in range(10**4):\n"
    code += (
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nexcept RuntimeError: print(n)\nimport os\nos._exit(0)"
    )
    assert int(run(code, True)) < own._THREADS


@ROOT
@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_roots_program_is_nobodys() -> None:
    async def call() -> None:
        limits = PythonLimits()
        running = asyncio.create_task(Guarded(limits, Own(limits)).run(b"import time\ntime.sleep(1)"))
        users: set[str] = set()
        until = time.monotonic() + 10
        while not users and time.monotonic() < until:
            await asyncio.sleep(0.02)
            users = {status for status in map(_status, _children_of_guards()) if status}
        await running
        assert users == {"65534 65534 65534 65534"}

    if not re.search(r"^\s*0\s+0\s+4294967295$", Path("/proc/self/uid_map").read_text()):
        pytest.skip("no user nobody in this user namespace")
    asyncio.run(call())


def _children_of_guards() -> list[Path]:
    """Programs whose guard is a child of this process."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = Path("/proc", (process / "stat").read_text().rpartition(")")[2].split()[1])
            theirs = (parent / "stat").read_text().rpartition(")")[2].split()[1]
            if theirs == str(os.getpid()) and (process / "cmdline").read_bytes().endswith(b"\0utf8\0main.py\0"):
                found.append(process)
        except OSError:
            continue
    return found


def _status(process: Path) -> str:
    try:
        return next(" ".join(line.split()[1:]) for line in (process / "status").read_text().splitlines() if line.startswith("Uid:"))
    except OSError:
        return ""


@BOTH
def test_a_program_does_not_outlive_its_guard(namespaces: bool) -> None:
    """The guard is killed, as when memory runs out, and the program has tried to undo its tie to it."""
    code = "import ctypes, time\nprint(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0), flush=True)\ntime.sleep(60)"

    async def call() -> None:
        limits = PythonLimits(namespaces=namespaces)
        running = asyncio.create_task(Guarded(limits, Own(limits)).run(code.encode()))
        until = time.monotonic() + 10
        while not (programs := _children_of_guards()) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        (program,) = programs
        os.kill(int((program / "stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        with pytest.raises(ToolError, match="the sandbox failed"):
            await running
        while program.exists() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        assert not program.exists()

    asyncio.run(call())


@BOTH
def test_two_programs_at_once_see_nothing_of_each_other(namespaces: bool) -> None:
    limits = PythonLimits(namespaces=namespaces)
    sandbox = Guarded(limits, Own(limits))
    code = "import glob, os, time\nopen('mine', 'w').write('x')\ntime.sleep(0.3)\n"
    code += "print(sorted(os.listdir('.')), glob.glob(os.path.dirname(os.getcwd()) + '/tool-*/*'))\n"
    code += "for other in ('..', os.path.dirname(os.getcwd())):\n"
    code += "  try: print([name for name in os.listdir(other) if name.startswith('tool-')])\n  except OSError: print([])"

    async def both() -> list[str]:
        return [ended.output for ended in await asyncio.gather(*(sandbox.run(code.encode()) for _ in range(2)))]

    assert asyncio.run(both()) == ["['main.py', 'mine'] []\n[]\n[]\n"] * 2


NOT_AT_ALL = "import sys\nfrom asyncmoe.rollout.episodes.tools.sandboxes import python_tool\n"
NOT_AT_ALL += "from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits\nfrom asyncmoe.errors import UserError\n"
NOT_AT_ALL += (
    "try: python_tool(PythonLimits(namespaces=sys.argv[1] == 'True'))\nexcept UserError as error: print(error)\nelse: print('works')"
)


def _without_user_namespaces(namespaces: bool) -> str:
    """What `python_tool` says in a user namespace that allows none inside: the kernel's own refusal, without a change of this machine."""
    if shutil.which("unshare") is None:
        pytest.skip("no program unshare: apt install util-linux")
    inside = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", inside, "sh", sys.executable, "-c", NOT_AT_ALL, str(namespaces)]
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@ROOT
def test_without_user_namespaces_it_is_refused_in_one_line() -> None:
    expected = "tools python: got no user namespace (No space left on device), expected a kernel that confines a program; as root: sysctl "
    expected += "user.max_user_namespaces=10000, or set namespaces=false"
    assert _without_user_namespaces(True).startswith(expected)
    if NO_LANDLOCK is None:
        assert _without_user_namespaces(False) == "works\n"


def test_which_switches_refuse(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "user").mkdir()
    assert kernel_support.refusing_switches(tmp_path) == ()
    (tmp_path / "kernel" / "unprivileged_userns_clone").write_text("0\n")
    (tmp_path / "kernel" / "apparmor_restrict_unprivileged_userns").write_text("1\n")
    (tmp_path / "user" / "max_user_namespaces").write_text("96365\n")
    expected = ("kernel.unprivileged_userns_clone=1", "kernel.apparmor_restrict_unprivileged_userns=0")
    assert kernel_support.refusing_switches(tmp_path) == expected
    assert [kernel_support.counts_in_namespaces(release) for release in ("5.13.0-generic", "5.14.0", "6.1", "odd")] == [
        False,
        True,
        True,
        False,
    ]


@LANDLOCK
def test_neither_namespaces_nor_landlock_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(own, "landlock_version", lambda: 0)
    with caplog.at_level(logging.WARNING):
        python_tool(PythonLimits(namespaces=False))
    assert "its code may read and write whatever this user may" in caplog.text
    refused = Own(PythonLimits()).refused("OSError: [Errno 1] Operation not permitted: 'unshare'")
    assert "choose another environment.sandbox.backend" in str(refused)


@BOTH
def test_a_program_that_cannot_start_says_why(namespaces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    files = python_files()
    without = {inside: outside for inside, outside in files.bound.items() if inside != files.python}
    monkeypatch.setattr(own, "python_files", lambda: replace(files, bound=without))
    with pytest.raises(ConfigError, match=r"tools python: got (FileNotFound|Permission)Error: \[Errno \d+\] .*python.*, expected a kernel"):
        python_tool(PythonLimits(namespaces=namespaces))
    monkeypatch.setattr(own, "python_files", lambda: replace(files, bound={**files.bound, "/nowhere": "/nowhere"}))
    with pytest.raises(ConfigError, match=r"tools python: got FileNotFoundError: .*/nowhere', expected a kernel"):
        python_tool(PythonLimits(namespaces=namespaces))


@ROOT
@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_a_python_that_nobody_may_not_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = python_files()
    private = tmp_path / "python"
    private.write_bytes(b"")
    private.chmod(0o700)
    monkeypatch.setattr(own, "python_files", lambda: replace(files, bound={**files.bound, files.python: str(private)}))
    with pytest.raises(ConfigError, match=rf"a Python with {private}, which others may not read, expected .*chmod -R o\+rX {private}"):
        python_tool(PythonLimits())


def test_landlock_is_what_the_kernel_says() -> None:
    if not sys.platform.startswith("linux"):
        assert kernel_support.landlock_version() == 0
    else:
        assert kernel_support.landlock_version() == max(0, ctypes.CDLL(None).syscall(444, None, 0, 1))
