"""A model's program runs within all limits, cannot leave its sandbox, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.process import wait_until
from asyncmoe.rollout.episodes.tools.loading import python_tool
from asyncmoe.rollout.episodes.tools.sandbox import Bubblewrap, PythonLimits, printed
from asyncmoe.rollout.episodes.tools.tool import ToolError
from tests.unit.asynchronous import until

LIMITS = PythonLimits(wall_s=60.0)
"""On a machine that has other work, too."""


def why_not() -> str | None:
    try:
        python_tool(LIMITS, SandboxSection())
    except ConfigError as error:
        return str(error)
    return None


NO_SANDBOX = why_not()
pytestmark = pytest.mark.skipif(NO_SANDBOX is not None, reason=str(NO_SANDBOX))


def limited(**limits: float) -> PythonLimits:
    return PythonLimits.model_validate({**LIMITS.model_dump(), **limits})


async def called(code: str, limits: PythonLimits = LIMITS) -> str:
    """What it printed, or the reason and the detail why there is no result."""
    try:
        return await printed(Bubblewrap(limits).run, code, limits)
    except ToolError as error:
        return f"{error.reason}: {error.detail}"


def run(code: str, limits: PythonLimits = LIMITS) -> str:
    return asyncio.run(called(code, limits))


def running(mark: str) -> list[int]:
    """Processes of this machine with a mark in their command lines, but this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in command and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def has_child(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/task/{process}/children").read_text() != ""
    except OSError:
        return False


def gone(mark: str) -> bool:
    return wait_until(lambda: not running(mark), 10)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import math, sys\nprint(6*7)\nprint(math.pi, file=sys.stderr)", "42\n3.141592653589793\n"),
        ("print('é')", "é\n"),
        ("print('before')\n1/0", 'tool_error: before\nTraceback (most recent call last):\n  File "main.py", line 2, in <module>\n    1/0'),
        ("x = (", 'tool_error:   File "main.py"'),
        ("raise SystemExit(3)", "tool_error: error: the program ended with status 3"),
        ("import ctypes\nctypes.string_at(0)", "tool_killed: error: the program was ended by SIGSEGV"),
        ("import os\nwhile True: os.write(2, b'y' * 65536)", "tool_flood: " + "y" * 3000 + "\n[cut at 3000 bytes]"),
        ("#" * 4000, "tool_error: error: a program of 4000 bytes, more than 3999"),
    ],
)
def test_a_program_and_what_it_says(code: str, said: str) -> None:
    told = run(code, limited(output_bytes=3000, code_bytes=3999))
    assert told.startswith(said)
    assert told == said or said.startswith("tool_error")


def test_a_program_without_end_is_ended() -> None:
    catches = "import os, signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
    spent = "tool_timeout: 1\nerror: the program took more than 1 s of CPU time"
    assert run(f"{catches}print(1)\nwhile True: pass", limited(cpu_s=1.0)) == spent
    text = run(f"{catches}if os.fork() == 0: os.setsid()\ntime.sleep(600)", limited(wall_s=1.0))
    assert text == "tool_timeout: error: the program took longer than 1 s"


def test_nothing_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a file either: this process has one that any program inherits, and uvloop does not close it."""
    monkeypatch.setenv("A_SECRET", "xyzzy")
    inherited = os.memfd_create("inherited", flags=0)
    assert run("import os\nprint(sorted(os.environ), os.listdir('.'))") == "['HOME', 'LANG', 'PATH', 'TMPDIR'] ['main.py']\n"
    code = "import os\nfor n in range(3, 1000):\n  try: os.fstat(n)\n  except OSError: pass\n  else: print(n)"
    assert run(code) == uvloop.run(called(code)) == ""
    os.close(inherited)
    assert run("import numpy").rstrip().endswith("No module named 'numpy'")


def test_a_cancelled_call_leaves_nothing() -> None:
    limits = limited(memory_bytes=2**28 + os.getpid())

    async def call() -> None:
        calling = asyncio.create_task(called("import os, time\nos.fork()\ntime.sleep(600)", limits))
        await until(lambda: running(str(limits.memory_bytes)))
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)

    asyncio.run(call())
    assert gone(str(limits.memory_bytes))


def test_programs_end_with_the_controller() -> None:
    mark = 2**28 + os.getpid()
    code = "import asyncio\nfrom asyncmoe.rollout.episodes.tools.sandbox import *\n"
    code += f"asyncio.run(Bubblewrap(PythonLimits(wall_s=300.0, memory_bytes={mark})).run(b'import time; time.sleep(300)'))"
    with subprocess.Popen([sys.executable, "-c", code]) as controller:
        wait_until(lambda: sum(map(has_child, running(f'"RLIMIT_AS": [{mark}'))) == 2, 60)  # bubblewrap's two processes
        controller.kill()
    assert gone(f'"RLIMIT_AS": [{mark}')


def refused(**limits: Any) -> str:
    with pytest.raises(ConfigError) as error:
        python_tool(PythonLimits.model_validate(limits), SandboxSection())
    assert error.value.what == "environment.sandbox"
    assert "\n" not in str(error.value)
    return str(error.value.got)


@pytest.mark.parametrize(("limit", "most"), [("open_files", 3), ("memory_bytes", 2**20), ("wall_s", 0.001)])
def test_a_limit_within_which_nothing_runs_is_named(limit: str, most: float) -> None:
    assert f"{limit!r}: {most}" in refused(**{limit: most})


def test_a_machine_without_a_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == "bwrap" else which(name, path=path) or name)
    assert refused() == "no program bwrap"


def test_a_site_without_user_namespaces_is_refused_in_one_line() -> None:
    """In a user namespace that allows none inside: the kernel's own refusal, without a change of this machine."""
    code = "from asyncmoe.rollout.episodes.tools.loading import PythonLimits, python_tool\n"
    code += "from asyncmoe.config.sandbox import SandboxSection\nfrom asyncmoe.errors import UserError\n"
    code += "try: python_tool(PythonLimits(), SandboxSection())\nexcept UserError as error: print(error)"
    inside = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", inside, "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("environment.sandbox: got bubblewrap says: ")
    assert all(way in done.stdout for way in ("user namespaces", "environment.sandbox.url"))
    assert done.stdout.count("\n") == 1


def test_a_sandbox_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "bwrap").chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(Bubblewrap, "start_s", 0.5)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # pytest's folders are root's own
    assert "bubblewrap started no program within 0.5 s" in refused()
