"""How a trainer's rank ends: without the interpreter's own end, which Gloo's threads may abort."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from asyncmoe.errors import UserError
from asyncmoe.process import Child, say

ABORTS = "import atexit, os; atexit.register(os.abort); "
"""Stands for a thread of Gloo at the interpreter's end: whatever runs there ends with SIGABRT."""
LEAVES = "from asyncmoe.process import leave; print('said'); leave({status})"
TRAINS = """
from unittest import mock
from asyncmoe.trainer import __main__ as command
class Loop:
    run = staticmethod({run})
with (
    mock.patch.object(command.sys, "argv", ["trainer", "run.yaml"]),
    mock.patch.object(command.configuration, "load"),
    mock.patch.object(command.heartbeats, "start"),
    mock.patch.object(command.connections, "in_order"),
    mock.patch("asyncmoe.platform.megatron.prepare"),
    mock.patch.dict(command.sys.modules, {{"asyncmoe.trainer.loop": Loop}}),
    mock.patch("asyncmoe.trainer.loop", Loop, create=True),
):
    command.main()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ABORTS + program], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_leaves_with_its_status_and_its_output(status: int) -> None:
    ended = run(LEAVES.format(status=status))
    assert (ended.returncode, ended.stdout) == (status, "said\n")


@pytest.mark.parametrize(("what", "status"), [("print", 0), ("lambda config: 1 / 0", 1)])
def test_a_rank_of_the_trainer_leaves_so(what: str, status: int) -> None:
    ended = run(TRAINS.format(run=what))
    assert ended.returncode == status, ended.stderr
    assert ("ZeroDivisionError" in ended.stderr) == bool(status)


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


def test_what_has_ended_and_nobody_reaps_is_not_waited_for(tmp_path: Path) -> None:
    """Orphans of the child become this process's own, as they become those of a container's first process."""
    adopt, pids = partial(ctypes.CDLL(None).prctl, 36), tmp_path / "log"  # PR_SET_CHILD_SUBREAPER
    adopt(1, 0, 0, 0, 0)
    try:
        child = Child("parent", ["sh", "-c", "sleep 600 & echo $!; wait"], pids)
        while not pids.read_text().strip():
            time.sleep(0.01)
        began = time.monotonic()
        child.end(5.0)
        assert time.monotonic() - began < 4
        assert os.waitpid(int(pids.read_text()), os.WNOHANG)[1] == signal.SIGTERM
    finally:
        adopt(0, 0, 0, 0, 0)
