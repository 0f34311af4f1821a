"""What a program tries against the default sandbox, and what it gets; both as the user of the tests and as an ordinary one."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import platform
import socket
import subprocess
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes import sandbox_of, walls
from tests.unit.sandboxed import LIMITS, NOBODY, SANDBOX, limited, running

pytestmark = [SANDBOX, pytest.mark.parametrize("who", ["this user", "an ordinary user"])]
REPOSITORY = Path(__file__).parents[2]
ADD_KEY, KEYCTL = (248, 250) if platform.machine() == "x86_64" else (217, 219)


@pytest.fixture(autouse=True)
def ordinary(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes start as nobody, who then builds them like any user without rights; root builds its own ones in another way."""
    if who == "an ordinary user":
        if os.geteuid() != 0:
            pytest.skip("the tests run as an ordinary user")
        start = asyncio.create_subprocess_exec

        async def as_nobody(*command: str, **more: object) -> asyncio.subprocess.Process:
            return await start(*command, user=NOBODY, group=NOBODY, extra_groups=[], **more)  # type: ignore[arg-type]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", as_nobody)
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)


def run(code: str, limits: PythonLimits = LIMITS) -> str:
    return asyncio.run(sandbox_of(limits, SandboxSection()).run(code.encode())).output


def successes(attempts: Iterable[str]) -> list[str]:
    """The attempts, lines of code, that raised no error of the system in one program. C(name, ...) calls libc, and raises its error."""
    code = "import ctypes, os, resource, socket, signal\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    code += "def C(name, *arguments):\n  ctypes.set_errno(0)\n"
    code += "  if getattr(libc, name)(*arguments) == -1: raise OSError(ctypes.get_errno(), name)\n"
    code += "".join(f"try: {one}\nexcept (OSError, ValueError): pass\nelse: print({one!r})\n" for one in attempts)
    text = run(f"{code}print('end')")
    assert text.endswith("end\n"), text
    return text.splitlines()[:-1]


def test_no_file_of_a_run_its_user_or_its_machine_can_be_read(tmp_path: Path) -> None:
    answers = tmp_path / "train.jsonl"
    answers.write_text('{"question": "6*7", "answer": "42"}')
    readable = [answers, Path(__file__), Path(walls.__file__), Path(pytest.__file__), Path("/etc/passwd"), Path("/proc/1/status")]
    assert all(path.read_bytes() for path in readable)
    secret = [
        "/etc/shadow",
        f"/proc/{os.getpid()}/environ",
        "/proc/self/environ",
        "/proc/kcore",
        "/sys/kernel/notes",
        "/dev/mem",
        "/dev/sda",
    ]
    paths = [*map(str, readable), *secret, f"/proc/{os.getpid()}/root/etc/passwd", f"../../{answers}", f"/sandbox/../{answers}"]
    attempts = [f"open({path!r}, 'rb').read(1)" for path in paths]
    attempts += [f"os.symlink({path!r}, 'l{n}'); open('l{n}', 'rb').read(1)" for n, path in enumerate(paths)]
    attempts += [f"os.link({path!r}, 'h{n}'); open('h{n}', 'rb').read(1)" for n, path in enumerate(paths)]
    attempts += [f"os.open({path!r}, os.O_RDONLY, dir_fd=os.open('/', os.O_PATH))" for path in map(str, readable)]
    attempts += [f"os.listdir({str(path)!r})" for path in (tmp_path, Path.home(), "/home", "/root", "/tmp", "/etc/ssl", "/run", REPOSITORY)]
    assert successes(attempts) == []


def test_nothing_outside_can_be_changed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("as it was")
    before, name = file.stat(), str(file)
    attempts = [f"open({name!r}, {mode!r})" for mode in ("w", "a", "r+")]
    attempts += [f"os.{call}" for call in (f"truncate({name!r}, 0)", f"chmod({name!r}, 0)", f"remove({name!r})", "mkdir('/new')")]
    attempts += ["os.link('/usr/bin/env', 'mine')", "os.chmod('/usr/bin/env', 0o4777)", "os.utime('/usr/bin/env')", "os.mkdir('/tmp')"]
    attempts += [f"open({path + '/new'!r}, 'w')" for path in ("/usr/lib", "/lib", "/bin", "/etc", "/dev", "/dev/shm", "/")]
    attempts += ["C('mount', b'none', b'/usr', b'tmpfs', 32, b'')", "os.rename('/usr', '/gone')", "os.mknod('null', 0o020666, 0x103)"]
    assert successes(attempts) == []
    assert (file.stat(), file.read_text()) == (before, "as it was")


def test_no_right_is_gained() -> None:
    attempts = [f"os.{call}" for call in ("setuid(0)", "setresgid(0, 0, 0)", "setgroups([0])", "chroot('.')", "nice(-5)")]
    attempts += ["C('unshare', 0x10000000)", "C('unshare', 0x20000)", "C('unshare', 0x40000000)", "C('umount2', b'/usr', 2)"]
    attempts += ["C('mount', b'none', b'/sandbox', b'proc', 0, b'')", "C('mount', b'/', b'/sandbox', None, 4096, b'')"]
    attempts += ["C('sethostname', b'mine', 4)", "C('clock_settime', 0, (ctypes.c_long * 2)(1, 1))", "C('reboot', 0x01234567)"]
    attempts += ["C('init_module', 0, 0, b'')", "C('swapon', b'main.py', 0)", "C('acct', b'main.py')", "C('quotactl', 0, 0, 0, 0)"]
    attempts += ["C('klogctl', 3, ctypes.create_string_buffer(99), 99)", "C('setns', 0, 0)", "C('syscall', 321, 0, 0, 0)"]
    attempts += [f"resource.setrlimit(resource.RLIMIT_{name}, (1 << 40, 1 << 40))" for name in ("AS", "CPU", "FSIZE", "NOFILE", "NPROC")]
    assert successes(attempts) == []
    code = "import subprocess\nfor name in ('su', 'mount', 'passwd', 'sudo', 'newgrp'):\n"
    code += "  try: print(subprocess.run([name, *'-c id'.split()], capture_output=True).returncode != 0)\n  except OSError: print(True)\n"
    assert run(code) == "True\n" * 5
    code = "import ctypes\nbits = (ctypes.c_uint32 * 6)()\nctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), bits)\n"
    code += "print(list(bits))"
    assert run(code) == "[0, 0, 0, 0, 0, 0]\n"


def test_nothing_of_this_machine_can_be_reached(tmp_path: Path) -> None:
    abstract = f"\0asyncmoe-{uuid.uuid4().hex}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as named,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unnamed,
    ):
        named.bind(str(tmp_path / "s"))
        unnamed.bind(abstract)
        attempts = [
            f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)",
            "socket.create_connection(('1.1.1.1', 53), 5)",
        ]
        attempts += ["socket.getaddrinfo('example.org', 80)", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"]
        attempts += ["socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('2606:4700:4700::1111', 53))"]
        attempts += [f"socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', {one!r})" for one in (abstract, str(tmp_path / "s"))]
        attempts += [f"socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', {one!r})" for one in (abstract, str(tmp_path / "s"))]
        attempts += ["os.open('/dev/tty', os.O_RDWR)", "C('ioctl', 0, 0x5412, b'x')", "os.tcgetpgrp(1)"]
        assert successes(attempts) == []
        for one in (named, unnamed):
            one.settimeout(0)
            with pytest.raises(BlockingIOError):
                one.recv(1)
    assert run("import socket\na, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))") == "b'x'\n"


def test_no_other_process_can_be_touched() -> None:
    outside = f"[{os.getpid()}, {os.getppid()}]"
    attempts = [
        f"[os.{call.replace('N', outside + '[0]')}]" for call in ("kill(N, 0)", "pidfd_open(N)", "getpgid(N)", "sched_getaffinity(N)")
    ]
    attempts += [f"C('ptrace', 16, {os.getpid()}, 0, 0)", f"resource.prlimit({os.getpid()}, resource.RLIMIT_CPU)"]
    assert successes(attempts) == []
    # Neither the first process of the sandbox nor bwrap can be ended by a program, which ends with all it has started.
    assert run("import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(1, signal.SIGSTOP)\nprint('on')") == "on\n"
    mark = uuid.uuid4().hex
    code = f"import os, subprocess, time\nmark = {mark!r}\n"
    code += "for n in range(3): subprocess.Popen(['sh', '-c', 'sleep 600 #' + mark], start_new_session=True)\n"
    assert run(f"{code}print('over')") == "over\n"
    assert running(f"#{mark}") == []


@pytest.fixture
def memory_outside() -> Iterator[int]:
    """A segment of System V's shared memory that anybody may read."""
    libc = ctypes.CDLL(None, use_errno=True)
    key = os.getpid()
    segment = libc.shmget(key, 4096, 0o1666)
    assert segment >= 0
    yield key
    libc.shmctl(segment, 0, None)


def test_no_shared_memory_of_others_is_seen(memory_outside: int) -> None:
    attempts = [
        f"C('shmget', {memory_outside}, 0, 0)",
        "os.open('/dev/shm/x', os.O_CREAT | os.O_RDWR)",
        "C('mq_open', b'/x', 0o102, 0o600, None)",
    ]
    assert successes(attempts) == []


LOGIN = f"""import ctypes, json, subprocess, sys
code = '''import ctypes
libc, text = ctypes.CDLL(None), ctypes.create_string_buffer(99)
found = libc.syscall({KEYCTL}, 10, -3, b"user", b"asyncmoe-test", 0)
libc.syscall({KEYCTL}, 11, found, text, 99)
print(found > 0, text.value)'''
libc = ctypes.CDLL(None)
assert libc.syscall({KEYCTL}, 1, b"of-a-login") > 0
assert libc.syscall({ADD_KEY}, b"user", b"asyncmoe-test", b"secret", 6, -3) > 0
for command in ([sys.executable, "-c", code], json.loads(sys.argv[1])):
    subprocess.run(command, input=code, text=True)
"""


def test_no_key_of_the_users_keyrings_is_read(who: str) -> None:
    """A login's keyring may hold tickets and passwords, and a process passes it on to all that it starts."""
    command = json.dumps(walls.Bubblewrap(LIMITS, SandboxSection()).command(""))
    user: dict[str, Any] = {} if who == "this user" else {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    login = ["/usr/bin/python3", "-c", LOGIN, command]
    done = subprocess.run(login, **user, capture_output=True, text=True, cwd="/", timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("True b'secret'\n\0False b''\n", "")


HOLDERS = {
    "memory": ("x = bytearray(10**10)", "MemoryError"),
    "growing memory": ("x = [0]\nwhile True: x = x * 2", "MemoryError"),
    "an anonymous map": ("import mmap\nmmap.mmap(-1, 10**10)", "OSError: [Errno 12]"),
    "a file": ("with open('a', 'wb') as f: f.write(bytes(2**24 + 1))", "OSError"),
    "many files": ("for n in range(99): open(str(n), 'wb').write(bytes(2**20))", "No space left"),
    "a sparse file": ("open('a', 'wb').truncate(2**40)", "File too large"),
    "one memfd": ("import os\nos.write(os.memfd_create('x'), bytes(2**24 + 2))\nos.truncate(3, 2**30)", "Error"),
    "descriptors": ("x = [open('main.py') for _ in range(99)]", "Too many open files"),
    "locked memory": ("import ctypes\nb = bytes(2**20)\nprint(ctypes.CDLL(None).mlock(b, 2**20))", "-1"),
    "message queues": ("import ctypes\nprint(ctypes.CDLL(None).mq_open(b'/x', 0o102, 0o600, None))", "-1"),
    "processes": ("import os\nn = 0\ntry:\n  while os.fork(): n += 1\nexcept OSError: print(n < 16)\nelse: os.pause()", "True"),
    "threads": (
        "import threading, time\nn = 0\ntry:\n  while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "except RuntimeError: print(n < 16, flush=True)\nimport os\nos._exit(0)",
        "True",
    ),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_a_program_takes_is_bounded(holder: str) -> None:
    code, told = HOLDERS[holder]
    assert told in run(code)


def test_a_fork_bomb_ends_with_its_time() -> None:
    code = "import os, signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    code += "while True:\n  try: os.fork(); os.setsid()\n  except OSError: pass"
    limits = limited(wall_s=2.0, cpu_s=1.0, memory_bytes=2**28 + os.getpid())
    ended = asyncio.run(sandbox_of(limits, SandboxSection()).run(code.encode()))
    assert ended.timeout is not None
    assert running(str(limits.memory_bytes)) == []


def test_the_system_ends_a_program_before_anything_else() -> None:
    """Where memory runs out, also in a SLURM job: the whole sandbox, with what no limit of a process counts."""
    limits = limited(wall_s=3.0, memory_bytes=2**28 + os.getpid())

    async def scores() -> set[str]:
        running_program = asyncio.create_task(sandbox_of(limits, SandboxSection()).run(b"import time\ntime.sleep(60)"))
        found: set[str] = set()
        while not running_program.done():
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    if str(limits.memory_bytes).encode() in (entry / "cmdline").read_bytes() and (entry / "comm").read_text() == "bwrap\n":
                        found.add((entry / "oom_score_adj").read_text().strip())
                except OSError:
                    continue
            await asyncio.sleep(0.1)
        return found

    assert asyncio.run(scores()) == {"1000"}


def test_the_root_of_a_program() -> None:
    code = "import os\nprint(os.getuid(), os.uname().nodename, sorted(os.listdir('/')), sorted(os.listdir('/etc')))"
    uid, name, rest = run(code).split(" ", 2)
    assert (uid, name) == ("1000", "sandbox")
    root, etc = rest.split("] [")
    assert not set(root.strip("[").replace("'", "").split(", ")) & {"home", "root", "proc", "sys", "tmp", "run", "var", "mnt"}
    assert etc in ("'ld.so.cache']\n", "]\n")
    code = "import asyncio, bz2, ctypes, decimal, hashlib, lzma, sqlite3, ssl, threading, zoneinfo\nasyncio.run(asyncio.sleep(0))\n"
    code += "print(sqlite3.connect(':memory:').execute('select 6*7').fetchone(), hashlib.sha3_256(b'').hexdigest()[:4])"
    assert run(code) == "(42,) a7ff\n"
