"""What runs inside a step: its status, and the signals by which it is asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncmoe.launch.slurm.command import Stop

ROOT = Path(__file__).parents[2]


def test_a_part_that_meets_a_mistake_of_the_user_ends_the_step_with_its_status(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncmoe.launch.slurm.task", "-m", "asyncmoe", "rollout", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"error: {tmp_path / 'none.yaml'}: got no such file" in done.stderr


ASKED = """
import asyncio, os, signal, threading, uvloop
from asyncmoe.launch.slurm import task
async def main():
    heard = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, heard.append, 1)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGURG)).start()
    await asyncio.sleep(0.5)
    print(len(heard))
task.stop_as(signal.SIGINT, signal.SIGURG)
uvloop.run(main())
"""


def test_a_request_to_stop_is_heard_once() -> None:
    """The second would end the run without a checkpoint."""
    done = subprocess.run([sys.executable, "-c", ASKED], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"


WARNED = """
import os, signal, subprocess, time
child, heard = subprocess.Popen(["sleep", "60"]), []
signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
for number, pid in ((signal.SIGTERM, child.pid), (signal.SIGTERM, os.getpid()), (signal.SIGURG, os.getpid())):
    os.kill(pid, number)
    time.sleep(0.5)
    print(len(heard), child.poll(), flush=True)
child.kill()
"""


@pytest.mark.parametrize(("role", "said"), [("rollout", "0 None\n1 None\n1 None\n"), ("engine", "0 None\n0 None\n1 None\n")])
def test_sigterm_warns_the_controller_once_and_nobody_else(tmp_path: Path, role: str, said: str) -> None:
    (tmp_path / "warned.py").write_text(WARNED)
    command = [sys.executable, "-m", "asyncmoe.launch.slurm.task", "-m", "warned", role]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == said


def test_ranks_that_hear_no_sigterm_are_ended_at_once(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import os, sys, time; time.sleep(300 * int(os.environ['RANK'])); sys.exit(3)")
    code = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); from asyncmoe.launch import torchrun as t; "
    code += "t.run(t.torchrun(2, ('127.0.0.1', t.free_port('127.0.0.1')), 'one')[2:])"
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}, check=False, timeout=120)
    assert done.returncode == 3
    assert time.monotonic() - begin < 30, "as long as torchrun waits before it kills"


@pytest.mark.parametrize(
    ("number", "wanted"),
    [(signal.SIGUSR1, (True, True, False)), (signal.SIGINT, (False, True, False)), (signal.SIGTERM, (False, False, True))],
)
def test_what_signals_ask_of_a_batch_script(number: signal.Signals, wanted: tuple[bool, bool, bool]) -> None:
    before = {other: signal.getsignal(other) for other in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)}
    try:
        stop = Stop()
        signal.raise_signal(number)
        assert (stop.requeue, stop.save, stop.now) == wanted
    finally:
        for other, handler in before.items():
            signal.signal(other, handler)
