"""A process's isolation, its end, and the cleanup of its children and garbage."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncmoe.errors import UserError
from asyncmoe.imports import uncollected
from asyncmoe.process import Child, say, wait_until

CODE = """
import asyncio, os, sys, uvloop
from asyncmoe.process import keep_files

async def start():
    code = f"import os\\ntry: os.fstat({sys.argv[1]})\\nexcept OSError: print('closed')\\nelse: print('open')"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    print((await process.communicate())[0].decode().strip(), flush=True)

uvloop.run(start())
keep_files()
os.fstat(int(sys.argv[1]))
uvloop.run(start())
"""


def test_programs_do_not_inherit_files() -> None:
    """On uvloop, which closes nothing in the programs that it starts."""
    inherited = os.memfd_create("inherited")
    command = [sys.executable, "-c", CODE, str(inherited)]
    done = subprocess.run(command, pass_fds=[inherited], capture_output=True, text=True, check=False, timeout=60)
    os.close(inherited)
    assert done.stdout.split() == ["open", "closed"], done.stderr


PROGRAM = """
import gc, weakref
from asyncmoe.process import freeze

class Node: ...

gc.disable()
kept = [[index] for index in range(200_000)]
garbage = Node()
garbage.itself, known = garbage, weakref.ref(garbage)
del garbage
freeze()
print(gc.get_freeze_count() >= 200_000, len(gc.get_objects()) < 1000, known() is None)
"""


def test_later_collections_leave_out_what_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "True", "True"]


ABORTS = "import atexit, os; atexit.register(os.abort); "
"""Stands for a thread of Gloo at the interpreter's end: whatever runs there ends with SIGABRT."""
LEAVES = "from asyncmoe.process import leave; print('said'); leave({status})"


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_leaves_with_its_status_and_its_output(status: int) -> None:
    program = ABORTS + LEAVES.format(status=status)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (status, "said\n")


def test_an_error_reaches_a_terminal_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say(UserError("a.py", got="boom\x1b[31m\r\x9b2J", expected="none"))
    assert capsys.readouterr().err == "error: a.py: got boom\\x1b[31m\\x0d\\x9b2J, expected none\n"


def test_a_killed_child_is_reaped_without_waiting_for_it(tmp_path: Path) -> None:
    child = Child("sleeper", ["sh", "-c", "sleep 600 & sleep 600"], tmp_path / "log")
    began = time.monotonic()
    child.kill()
    assert time.monotonic() - began < 0.5
    assert wait_until(lambda: not Path(f"/proc/{child.pid}").exists(), 10), "no zombie stays"
    child.end(0.0)


def test_nothing_is_collected_within_the_block_and_again_after_it() -> None:
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), uncollected():
        import nowhere  # noqa: F401
    assert gc.isenabled()
