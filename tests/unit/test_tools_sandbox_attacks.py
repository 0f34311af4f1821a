"""Attacks of a program on the sandbox, and their results."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import socket
import subprocess
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.rollout.episodes.tools import sandbox
from asyncmoe.rollout.episodes.tools.sandbox import Bubblewrap
from tests.unit.test_tools_sandbox import LIMITS, called, limited, pytestmark, run, running

__all__ = ["pytestmark"]
NOBODY = 65534
ADD_KEY, KEYCTL = (248, 250) if platform.machine() == "x86_64" else (217, 219)


@pytest.fixture(autouse=True, params=["this user", "an ordinary user"])
def who(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sandboxes start as nobody, who then builds them like any user without rights; root builds its own ones in another way."""
    if request.param == "an ordinary user":
        if os.geteuid() != 0:
            pytest.skip("the tests run as an ordinary user")
        start = asyncio.create_subprocess_exec

        async def as_nobody(*command: str, **more: object) -> asyncio.subprocess.Process:
            return await start(*command, user=NOBODY, group=NOBODY, extra_groups=[], **more)  # type: ignore[arg-type]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", as_nobody)
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    return str(request.param)


def successes(attempts: Iterable[str]) -> list[str]:
    """The attempts, lines of code, that raised no error of the system in one program. C(name, ...) calls libc, and raises its error."""
    code = "import ctypes, os, resource, socket, signal\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    code += "def C(name, *arguments):\n  ctypes.set_errno(0)\n"
    code += "  if getattr(libc, name)(*arguments) == -1: raise OSError(ctypes.get_errno(), name)\n"
    code += "".join(f"try: {one}\nexcept (OSError, ValueError): pass\nelse: print({one!r})\n" for one in attempts)
    text = run(f"{code}print('end')")
    assert text.endswith("end\n"), text
    return text.splitlines()[:-1]


def test_no_file_of_a_run_its_user_or_its_machine_can_be_read_or_changed(tmp_path: Path) -> None:
    answers = tmp_path / "train.jsonl"
    answers.write_text('{"question": "6*7", "answer": "42"}')
    readable = [answers, Path(sandbox.__file__), Path(pytest.__file__), Path("/etc/passwd"), Path("/proc/1/status")]
    assert all(path.read_bytes() for path in readable)
    paths = [
        *map(str, readable),
        "/etc/shadow",
        "/proc/self/environ",
        "/dev/mem",
        f"/proc/{os.getpid()}/root/etc/passwd",
        f"../..{answers}",
    ]
    attempts = [f"open({path!r}, 'rb').read(1)" for path in paths]
    attempts += [f"os.symlink({path!r}, 'l{n}'); open('l{n}', 'rb').read(1)" for n, path in enumerate(paths)]
    attempts += [f"os.link({path!r}, 'h{n}'); open('h{n}', 'rb').read(1)" for n, path in enumerate(paths)]
    attempts += [f"os.listdir({str(path)!r})" for path in (tmp_path, Path.home(), "/home", "/tmp", "/etc/ssl", "/run")]
    before, name = answers.stat(), str(answers)
    attempts += [f"open({name!r}, 'a')", f"os.truncate({name!r}, 0)", f"os.remove({name!r})", "os.mkdir('/new')"]
    attempts += ["os.link('/usr/bin/env', 'mine')", "os.chmod('/usr/bin/env', 0o4777)", "os.rename('/usr', '/gone')"]
    attempts += [f"open({path + '/new'!r}, 'w')" for path in ("/usr/lib", "/lib", "/bin", "/etc", "/dev", "/dev/shm", "/")]
    assert successes(attempts) == []
    assert answers.stat() == before


def test_no_right_is_gained() -> None:
    attempts = [f"os.{call}" for call in ("setuid(0)", "setresgid(0, 0, 0)", "setgroups([0])", "chroot('.')", "nice(-5)")]
    attempts += ["C('unshare', 0x10000000)", "C('unshare', 0x20000)", "C('umount2', b'/usr', 2)", "os.mknod('null', 0o020666, 0x103)"]
    attempts += ["C('mount', b'none', b'/sandbox', b'proc', 0, b'')", "C('sethostname', b'mine', 4)", "C('setns', 0, 0)"]
    attempts += ["C('klogctl', 3, ctypes.create_string_buffer(99), 99)", "C('syscall', 321, 0, 0, 0)"]
    attempts += [f"resource.setrlimit(resource.RLIMIT_{name}, (1 << 40, 1 << 40))" for name in ("AS", "CPU", "FSIZE", "NOFILE", "NPROC")]
    assert successes(attempts) == []
    code = "import ctypes\nbits = (ctypes.c_uint32 * 6)()\nctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), bits)\n"
    assert run(f"{code}print(list(bits))") == "[0, 0, 0, 0, 0, 0]\n"


def test_nothing_and_no_process_of_this_machine_can_be_reached(tmp_path: Path) -> None:
    abstract, key = f"\0asyncmoe-{uuid.uuid4().hex}", os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unnamed:
        unnamed.bind(abstract)
        unnamed.settimeout(0)
        attempts = [f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)", "socket.getaddrinfo('example.org', 80)"]
        attempts += ["socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "socket.create_connection(('1.1.1.1', 53), 5)"]
        attempts += [f"socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', {abstract!r})"]
        attempts += ["os.open('/dev/tty', os.O_RDWR)", "C('ioctl', 0, 0x5412, b'x')", "os.tcgetpgrp(1)"]
        attempts += [f"os.kill({key}, 0)", f"os.pidfd_open({key})", f"C('ptrace', 16, {key}, 0, 0)", "C('shmget', 1, 0, 0)"]
        assert successes(attempts) == []
        with pytest.raises(BlockingIOError):
            unnamed.recv(1)
    # Neither the first process of the sandbox nor bwrap can be ended by a program, which ends with all it has started.
    assert run("import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(1, signal.SIGSTOP)\nprint('on')") == "on\n"
    mark = uuid.uuid4().hex
    code = f"import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 600 #' + {mark!r}], start_new_session=True)\nprint('over')"
    assert run(code) == "over\n"
    assert running(f"#{mark}") == []


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
    user: dict[str, Any] = {} if who == "this user" else {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    login = ["/usr/bin/python3", "-c", LOGIN, json.dumps(Bubblewrap(LIMITS).command(""))]
    done = subprocess.run(login, **user, capture_output=True, text=True, cwd="/", timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("True b'secret'\n\0False b''\n", "")


HOLDERS = {
    "memory": ("x = [0]\nwhile True: x = x * 2", "MemoryError"),
    "a file": ("with open('a', 'wb') as f: f.write(bytes(2**24 + 1))", "OSError"),
    "many files": ("for n in range(99): open(str(n), 'wb').write(bytes(2**20))", "No space left"),
    "a sparse file": ("open('a', 'wb').truncate(2**40)", "File too large"),
    "descriptors": ("x = [open('main.py') for _ in range(99)]", "Too many open files"),
    "locked memory": ("import ctypes\nb = bytes(2**20)\nprint(ctypes.CDLL(None).mlock(b, 2**20))", "-1"),
    "message queues": ("import ctypes\nprint(ctypes.CDLL(None).mq_open(b'/x', 0o102, 0o600, None))", "-1"),
    "processes": ("import os\nn = 0\ntry:\n  while os.fork(): n += 1\nexcept OSError: print(n < 16)\nelse: os.pause()", "True"),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_a_program_takes_is_bounded(holder: str) -> None:
    code, told = HOLDERS[holder]
    assert told in run(code)


def test_a_fork_bomb_ends_with_its_time() -> None:
    code = "import os, signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    code += "while True:\n  try: os.fork(); os.setsid()\n  except OSError: pass"
    limits = limited(wall_s=2.0, cpu_s=1.0, memory_bytes=2**28 + os.getpid())
    assert run(code, limits).startswith("tool_timeout")
    assert running(str(limits.memory_bytes)) == []


def test_the_system_ends_a_program_before_anything_else() -> None:
    """Where memory runs out, also in a SLURM job: the whole sandbox, with what no limit of a process counts."""
    limits = limited(wall_s=2.0, memory_bytes=2**28 + os.getpid())

    async def scores() -> set[str]:
        calling = asyncio.create_task(called("import time\ntime.sleep(60)", limits))
        found: set[str] = set()
        while not calling.done():
            for process in running(str(limits.memory_bytes)):
                with suppress(OSError):
                    if Path(f"/proc/{process}/comm").read_text() == "bwrap\n":
                        found.add(Path(f"/proc/{process}/oom_score_adj").read_text().strip())
            await asyncio.sleep(0.1)
        return found

    assert asyncio.run(scores()) == {"1000"}


def test_the_root_of_a_program() -> None:
    code = "import os\nhidden = {*os.listdir('/')} & {*'home root proc sys tmp run var mnt'.split()}\n"
    code += "print(os.getuid(), os.uname().nodename, *hidden)\n"
    assert run(f"{code}print(*os.listdir('/etc'))") in ("1000 sandbox\nld.so.cache\n", "1000 sandbox\n\n")
    code = "import asyncio, bz2, ctypes, decimal, hashlib, lzma, sqlite3, ssl, threading, zoneinfo\nasyncio.run(asyncio.sleep(0))\n"
    assert run(f"{code}print(hashlib.sha3_256(b'').hexdigest()[:4])") == "a7ff\n"
