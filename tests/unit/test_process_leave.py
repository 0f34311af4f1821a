"""How a trainer's rank ends: without the interpreter's own end, which Gloo's threads may abort."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncmoe.errors import UserError
from asyncmoe.process import Child, say

ABORTS = "import atexit, os; atexit.register(os.abort); "
"""Stands for a thread of Gloo at the interpreter's end: whatever runs there ends with SIGABRT."""
LEAVES = "from asyncmoe.process import leave; print('said'); leave({status})"


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ABORTS + program], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_leaves_with_its_status_and_its_output(status: int) -> None:
    ended = run(LEAVES.format(status=status))
    assert (ended.returncode, ended.stdout) == (status, "said\n")


def test_an_error_reaches_a_terminal_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say(UserError("a.py", got="boom\x1b[31m\r\x9b2J", expected="none"))
    assert capsys.readouterr().err == "error: a.py: got boom\\x1b[31m\\x0d\\x9b2J, expected none\n"


def test_a_killed_child_is_reaped_without_waiting_for_it(tmp_path: Path) -> None:
    child = Child("sleeper", ["sh", "-c", "sleep 600 & sleep 600"], tmp_path / "log")
    began = time.monotonic()
    child.kill()
    assert time.monotonic() - began < 0.5
    until = time.monotonic() + 10
    while Path(f"/proc/{child.pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{child.pid}").exists(), "no zombie stays"
    child.end(0.0)
