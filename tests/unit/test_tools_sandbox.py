"""A model's program is run, bounded in everything, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import uvloop

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes import python_tool, walls
from tests.unit.sandboxed import LIMITS, SANDBOX, called, limited, run


def within(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def programs(parent: int) -> list[psutil.Process]:
    """Sandboxes of a process, each with its program."""
    try:
        found = psutil.Process(parent).children(recursive=True)
        return found if any(one.cmdline()[-1:] == ["main.py"] for one in found) else []
    except psutil.NoSuchProcess:
        return []


def ended(found: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in found)


@SANDBOX
def test_a_program_and_its_output() -> None:
    assert run("import math, sys\nprint(6*7)\nprint(math.pi, file=sys.stderr)") == "42\n3.141592653589793\n"
    assert run("") == ""
    assert run("print('é')") == "é\n"
    assert run("print(input())").rstrip().endswith("EOFError: EOF when reading a line")


@SANDBOX
def test_an_exception_is_told_without_our_paths() -> None:
    text = run("print('before')\n1/0")
    assert text.startswith('tool_error: before\nTraceback (most recent call last):\n  File "main.py", line 2, in <module>\n    1/0')
    assert text.rstrip().endswith("ZeroDivisionError: division by zero")
    assert run("x = (").startswith('tool_error:   File "main.py"')
    assert run("raise SystemExit(3)") == "tool_error: error: the program ended with status 3"
    assert "more than 10" in run("print(1)  # too long", limited(code_bytes=10))


@SANDBOX
@pytest.mark.parametrize(
    "catches", ["", "import signal\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"]
)
def test_a_program_without_end_is_ended(catches: str) -> None:
    assert run(f"{catches}print(1)\nwhile True: pass", limited(cpu_s=1.0)) == (
        "tool_timeout: 1\nerror: the program took more than 1 s of CPU time"
    )
    text = run(f"{catches}import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(600)", limited(wall_s=1.0))
    assert text == "tool_timeout: error: the program took longer than 1 s"


@SANDBOX
def test_a_program_that_crashes() -> None:
    assert run("import ctypes\nctypes.string_at(0)") == "tool_crash: error: the program was ended by SIGSEGV"


@SANDBOX
def test_a_flood_is_cut() -> None:
    limits = limited(output_bytes=3000)
    assert run("while True: print('x' * 1000)", limits).startswith("tool_flood: " + "x" * 1000)
    text = run("import os\nwhile True: os.write(2, b'y' * 65536)", limits)
    assert text == "tool_flood: " + "y" * 3000 + "\n[cut at 3000 bytes]"
    assert run("print('x' * 2999)", limits) == "x" * 2999 + "\n"


@SANDBOX
def test_nothing_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a file either: this process has one that any program inherits, and uvloop does not close it."""
    monkeypatch.setenv("A_SECRET", "xyzzy")
    inherited = os.memfd_create("inherited", flags=0)
    assert run("import os\nprint(sorted(os.environ), os.listdir('.'))") == "['HOME', 'LANG', 'PATH', 'TMPDIR'] ['main.py']\n"
    code = "import os\nfor n in range(3, 1000):\n  try: os.fstat(n)\n  except OSError: pass\n  else: print(n)"
    assert run(code) == ""
    assert uvloop.run(called(code)) == ""
    os.close(inherited)
    assert run("import numpy").rstrip().endswith("No module named 'numpy'")


@SANDBOX
def test_two_programs_at_once_see_nothing_of_each_other() -> None:
    code = "import os, time\nopen('mine', 'w').write('x')\ntime.sleep(1)\nprint(sorted(os.listdir('.')), os.path.exists('/proc'))"

    async def both() -> list[str]:
        return await asyncio.gather(called(code), called(code))

    assert asyncio.run(both()) == ["['main.py', 'mine'] False\n"] * 2


@SANDBOX
def test_a_cancelled_call_leaves_nothing() -> None:
    async def call() -> None:
        python = python_tool(LIMITS)
        calling = asyncio.create_task(python.call("import os, time\nos.fork()\ntime.sleep(600)"))
        while not (found := programs(os.getpid())):
            await asyncio.sleep(0.01)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await python.close()
        assert within(lambda: ended(found), 10)

    asyncio.run(call())


@SANDBOX
@pytest.mark.parametrize("killed", ["controller", "bwrap"])
def test_programs_end_with_the_controller_and_with_bwrap(killed: str) -> None:
    code = """import asyncio
from asyncmoe.rollout.episodes.tools import sandboxes
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
python = sandboxes.python_tool(PythonLimits(wall_s=300.0))
print("made", flush=True)
print(asyncio.run(python.call("import time\\ntime.sleep(300)")))
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"made\n"
        try:
            assert within(lambda: len(programs(controller.pid)) > 2, 60)
            found = programs(controller.pid)
        finally:
            (controller if killed == "controller" else found[0]).kill()
        assert within(lambda: ended(found))
        assert controller.stderr is not None
        assert ("the program was ended by SIGKILL" in controller.stderr.read().decode()) == (killed == "bwrap")


@SANDBOX
@pytest.mark.parametrize(("limit", "most"), [("open_files", 3), ("memory_bytes", 2**20), ("wall_s", 0.001)])
def test_a_limit_within_which_nothing_runs_is_named(limit: str, most: float) -> None:
    """Not the sandbox, which a user would then replace."""
    with pytest.raises(ConfigError, match=rf"tools\.options\.python: got .*{limit}={most}.*, expected limits within which Python starts"):
        python_tool(PythonLimits.model_validate({limit: most}))


def refused(section: SandboxSection | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        python_tool(PythonLimits(), section)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("missing", ["bwrap", "choom"])
def test_a_machine_without_a_program_is_refused_in_one_line(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which = walls.shutil.which  # type: ignore[attr-defined]
    monkeypatch.setattr(walls.shutil, "which", lambda name, path=None: None if name == missing else which(name, path=path) or name)
    assert refused().startswith(f"environment.sandbox: got no program {missing}, expected one that confines programs; install ")
    assert "environment.sandbox.image" in refused()


def test_a_python_that_is_not_there_is_refused() -> None:
    assert refused(SandboxSection(python="python2.3")).startswith("environment.sandbox.python: got python2.3, expected a Python in /usr/")


@SANDBOX
def test_a_python_that_the_program_may_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir(mode=0o700)
    (tmp_path / "bin" / "python3").write_text("")
    (tmp_path / "bin" / "python3").chmod(0o755)
    assert "bubblewrap says: " in refused(SandboxSection(python=str(tmp_path / "bin" / "python3")))


@SANDBOX
def test_a_site_without_user_namespaces_is_refused_in_one_line() -> None:
    """In a user namespace that allows none inside: the kernel's own refusal, without a change of this machine."""
    code = "from asyncmoe.rollout.episodes.tools.sandboxes import python_tool\n"
    code += "from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits\n"
    code += "from asyncmoe.errors import UserError\ntry: python_tool(PythonLimits())\nexcept UserError as error: print(error)"
    inside = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", inside, "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("environment.sandbox: got ")
    assert done.stdout.rstrip().endswith("environment.sandbox.image (docker, podman) or environment.sandbox.url (a server)")
    assert done.stdout.count("\n") == 1


@SANDBOX
def test_a_sandbox_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "bwrap").chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(walls.Bubblewrap, "start_s", 0.5)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)  # pytest's folders are root's own
    assert "bubblewrap started no program within 0.5 s" in refused()


@SANDBOX
def test_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run("open('a', 'w').write('x' * 9)\nprint(open('a').read())") == "x" * 9 + "\n"
    assert not list(tmp_path.iterdir())
