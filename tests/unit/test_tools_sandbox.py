"""A model's program is run, bounded in everything, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import uvloop

from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import seccomp
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes import guarded, own, python_tool
from asyncmoe.rollout.episodes.tools.tool import ToolError


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs have their directories here, where no other run of the tests leaves any."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def possible(namespaces: bool) -> bool:
    try:
        python_tool(PythonLimits(namespaces=namespaces))
    except ConfigError:
        return False
    return True


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux") or not possible(False), reason="no seccomp here")
NAMESPACES = pytest.mark.skipif(not sys.platform.startswith("linux") or not possible(True), reason="the kernel refuses user namespaces")
BOTH = pytest.mark.parametrize("namespaces", [pytest.param(True, marks=NAMESPACES), False])
WITHOUT = pytest.param(False, marks=pytest.mark.thorough if sys.platform.startswith("linux") and possible(True) else [])
ONE = pytest.mark.parametrize("namespaces", [pytest.param(True, marks=NAMESPACES), WITHOUT])
"""Of what does not depend on namespaces; where the kernel refuses them, without."""


def run(code: str, namespaces: bool, **limits: float) -> str:
    """What it printed, or the reason and the detail why there is no result."""
    return asyncio.run(one_call(code, namespaces, **limits))


async def one_call(code: str, namespaces: bool, **limits: float) -> str:
    python = python_tool(PythonLimits(namespaces=namespaces, **limits))  # type: ignore[arg-type]
    try:
        return await python.call(code)
    except ToolError as error:
        return f"{error.reason}: {error.detail}"
    finally:
        await python.close()


def mine() -> set[int]:
    """Guards and programs that this process has started, and those whose parent has ended; not those of another test's process."""
    found: dict[int, int] = {}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = process.cmdline()
            if any(part.endswith("guard.py") for part in command) or command[-3:] == ["-X", "utf8", "main.py"]:
                found[process.pid] = process.ppid()
    others = {pid for pid, parent in found.items() if parent not in found and parent not in (1, os.getpid())}
    return {pid for pid, parent in found.items() if pid not in others and parent not in others}


def gone(processes: Callable[[], set[int]]) -> bool:
    until = time.monotonic() + 60
    while processes() and time.monotonic() < until:
        time.sleep(0.02)
    return not processes()


@ONE
def test_what_a_program_prints_is_the_observation(namespaces: bool) -> None:
    assert run("import math, sys\nprint(6*7)\nprint(math.pi, file=sys.stderr)", namespaces) == "42\n3.141592653589793\n"
    assert run("", namespaces) == ""
    assert run("print('é')", namespaces) == "é\n"


@ONE
def test_an_exception_is_told_without_our_paths(namespaces: bool) -> None:
    text = run("print('before')\n1/0", namespaces)
    assert text.startswith('tool_error: before\nTraceback (most recent call last):\n  File "main.py", line 2, in <module>\n    1/0')
    assert text.rstrip().endswith("ZeroDivisionError: division by zero")
    assert "/tool-" not in text
    assert run("x = (", namespaces).startswith('tool_error:   File "main.py"')
    assert run("raise SystemExit(3)", namespaces) == "tool_error: error: the program ended with status 3"
    assert "MemoryError" in run("x = bytearray(10**10)", namespaces)
    assert "MemoryError" in run("x = [0]\nwhile True: x = x * 2", namespaces)
    assert "more than 10" in run("print(1)  # too long", namespaces, code_bytes=10)


@BOTH
def test_a_program_without_end_is_ended(namespaces: bool) -> None:
    text = run("print(1)\nwhile True: pass", namespaces, cpu_s=1.0)
    assert text == "tool_timeout: 1\nerror: the program took more than 1 s of CPU time"
    assert run("import time\ntime.sleep(60)", namespaces, wall_s=0.5) == "tool_timeout: error: the program took longer than 0.5 s"
    # Neither a new session nor ignored signals help it.
    code = "import ctypes, os, signal\nos.setsid() if os.getpid() != os.getsid(0) else 0\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
    code += "for n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\nimport time\ntime.sleep(60)"
    assert run(code, namespaces, wall_s=0.5).startswith("tool_timeout")
    assert gone(mine)


@ONE
def test_a_program_that_crashes(namespaces: bool) -> None:
    assert run("import ctypes\nctypes.string_at(0)", namespaces) == "tool_crash: error: the program was ended by SIGSEGV"


@ONE
def test_a_flood_is_cut(namespaces: bool) -> None:
    assert run("while True: print('x' * 1000)", namespaces, output_bytes=3000).startswith("tool_flood: " + "x" * 1000)
    text = run("import os\nwhile True: os.write(2, b'y' * 65536)", namespaces, output_bytes=3000)
    assert text == "tool_flood: " + "y" * 3000 + "\n[cut at 3000 bytes]"
    assert run("print('x' * 2999)", namespaces, output_bytes=3000) == "x" * 2999 + "\n"
    assert gone(mine)


@ONE
def test_nobody_waits_for_a_flood_to_be_read(namespaces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More output than asyncio keeps lies unread when the program is ended; a wait for its end alone never ends."""
    monkeypatch.setattr(guarded, "_GRACE_S", 3600.0)

    async def flood() -> None:
        python = python_tool(PythonLimits(namespaces=namespaces, output_bytes=3000))
        with pytest.raises(ToolError, match="cut at 3000 bytes"):
            await python.call("import os\nwhile True: os.write(1, b'x' * 65536)")
        await python.close()

    async def floods() -> None:
        async with asyncio.timeout(60):
            for _ in range(8):
                await flood()

    asyncio.run(floods())


FORK = 57 if platform.machine() == "x86_64" else 220
PROCESSES = [
    "import os\nwhile True: os.fork()",
    "import subprocess\nsubprocess.run(['true'])",
    "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    "import os\nraise OSError(1, os.strerror(1)) if os.system('true') else SystemExit",
    f"import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\nc.syscall({FORK}, 0)\nraise OSError(os.strerror(ctypes.get_errno()))",
    "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\nc.syscall(435, None, 0)\nraise OSError(ctypes.get_errno(), 'clone3')",
]


@BOTH
@pytest.mark.parametrize("code", PROCESSES)
def test_no_process_is_started(code: str, namespaces: bool) -> None:
    text = run(code, namespaces)
    assert text.startswith("tool_error")
    assert "Operation not permitted" in text or "[Errno 38] clone3" in text
    assert gone(mine)


@ONE
def test_threads_may_be_started_and_are_bounded_by_memory(namespaces: bool) -> None:
    assert run("import threading\nt = threading.Thread(target=print, args=('hi',))\nt.start()\nt.join()", namespaces) == "hi\n"
    code = "import threading, time\nfor _ in range(10**4): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    assert "can't start new thread" in run(code, namespaces, memory_bytes=256 * 2**20, wall_s=60.0)


@BOTH
def test_there_is_no_network(namespaces: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))", namespaces)
    assert "PermissionError" in text
    assert "PermissionError" in run("import socket\nsocket.socket(socket.AF_UNIX)", namespaces)


@BOTH
def test_nothing_is_inherited(namespaces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a file either: this process has one that any program inherits, and uvloop does not close it."""
    monkeypatch.setenv("A_SECRET", "xyzzy")
    inherited = os.memfd_create("inherited", flags=0)
    text = run("import os\nprint(sorted(os.environ), os.listdir('.'), os.get_inheritable(0))", namespaces)
    assert text == "['HOME', 'LANG', 'TMPDIR'] ['main.py'] True\n"
    code = "import os\nfor n in range(3, 1000):\n  try: os.fstat(n)\n  except OSError: pass\n  else: print(n)"
    assert run(code, namespaces) == ""
    assert uvloop.run(one_call(code, namespaces)) == ""
    os.close(inherited)
    assert run("import numpy", namespaces).rstrip().endswith("No module named 'numpy'")
    code = "import ctypes\nbits = (ctypes.c_uint32 * 6)()\nctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), bits)\n"
    code += "print(list(bits))"
    assert run(code, namespaces) == "[0, 0, 0, 0, 0, 0]\n"


@BOTH
def test_files_of_its_own_are_bounded_and_gone_afterwards(namespaces: bool) -> None:
    assert run("open('a', 'w').write('x' * 9)\nprint(open('a').read())", namespaces) == "x" * 9 + "\n"
    assert "OSError" in run("with open('a', 'wb') as f: f.write(bytes(2**20 + 1))", namespaces, file_bytes=2**20)
    assert "Too many open files" in run("x = [open('main.py') for _ in range(99)]", namespaces)
    assert run("import tempfile\nprint(tempfile.TemporaryFile().read())", namespaces) == "b''\n"
    assert not list(Path(tempfile.gettempdir()).glob("tool-*"))


@BOTH
def test_a_cancelled_call_leaves_nothing(namespaces: bool) -> None:
    async def call() -> None:
        python = python_tool(PythonLimits(namespaces=namespaces))
        calling = asyncio.create_task(python.call("import time\ntime.sleep(60)"))
        while (found := guard_and_program(os.getpid())) is None:
            await asyncio.sleep(0.01)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        assert not any(runs(process) for process in found)
        await python.close()

    asyncio.run(call())
    assert not list(Path(tempfile.gettempdir()).glob("tool-*"))


@BOTH
def test_programs_end_with_the_controller(namespaces: bool) -> None:
    """The program outlasts every wait of the test, also where the test's own process gets no processor for minutes."""
    code = f"""import asyncio
from asyncmoe.rollout.episodes.tools import sandboxes
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
python = sandboxes.python_tool(PythonLimits(namespaces={namespaces}, wall_s=3600.0))
print("made", flush=True)
asyncio.run(python.call("import time\\ntime.sleep(3600)"))
"""
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": tempfile.gettempdir()}
    with subprocess.Popen([sys.executable, "-c", code], env=here, stdout=subprocess.PIPE) as controller:
        try:
            assert controller.stdout is not None
            assert controller.stdout.readline() == b"made\n"
            until = time.monotonic() + 180
            while (found := guard_and_program(controller.pid)) is None and time.monotonic() < until:
                time.sleep(0.02)
            assert found is not None
        finally:
            controller.kill()
    assert gone(lambda: {process.pid for process in found if runs(process)})


def guard_and_program(controller: int) -> tuple[psutil.Process, psutil.Process] | None:
    """Those that run under a process; the program is executed already."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(controller).children(recursive=True):
            guard = process.parent()
            if process.cmdline()[-3:] == ["-X", "utf8", "main.py"] and guard is not None and str(guarded.GUARD) in guard.cmdline():
                return guard, process
    return None


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_machine_that_cannot_confine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    guard = tmp_path / "guard.py"
    guard.write_text("raise OSError(1, 'Operation not permitted', 'unshare')")
    monkeypatch.setattr(own, "GUARD", guard)
    with pytest.raises(ConfigError, match=r"Operation not permitted.*namespaces=false"):
        python_tool(PythonLimits())
    with pytest.raises(ConfigError, match="riscv64"):
        seccomp.program("riscv64")


@BOTH
@pytest.mark.parametrize(("limit", "told"), [("open_files", "open_files 3"), ("memory_bytes", "memory_bytes 3")])
def test_a_limit_within_which_nothing_runs_is_named(limit: str, told: str, namespaces: bool) -> None:
    """Not the kernel, whose protection a user would then switch off."""
    with pytest.raises(ConfigError, match=rf"tools\.options\.python: got {told}, expected limits within which Python starts; the default"):
        python_tool(PythonLimits(namespaces=namespaces, wall_s=5, **{limit: 3}))  # type: ignore[arg-type]


def test_a_wall_time_too_short_for_a_slow_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    guard = tmp_path / "guard.py"
    guard.write_text("import json, sys\nprint('ready' if json.loads(sys.argv[1])['wall_s'] > 1 else '')")
    monkeypatch.setattr(own, "GUARD", guard)
    with pytest.raises(ConfigError, match=r"got wall_s 0\.01, expected limits"):
        python_tool(PythonLimits(wall_s=0.01, cpu_s=4))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_lands_inside(machine: str) -> None:
    program = seccomp.program(machine)
    steps = [(program[i] | program[i + 1] << 8, program[i + 2], program[i + 3]) for i in range(0, len(program), 8)]
    assert steps[-1][0] == 0x06
    for i, (code, when, otherwise) in enumerate(steps):
        if code & 7 == 5:
            assert i + 1 + max(when, otherwise) < len(steps)
