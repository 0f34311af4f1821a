"""The process inside a step: its status, and the signals that ask it to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncmoe.launch.slurm.command import Stop

ROOT = Path(__file__).parents[2]


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


def test_what_signals_ask_of_a_batch_script() -> None:
    asked = {signal.SIGUSR1: (True, True, False), signal.SIGINT: (False, True, False), signal.SIGTERM: (False, False, True)}
    before = {number: signal.getsignal(number) for number in asked}
    try:
        for number, wanted in asked.items():
            stop = Stop()
            signal.raise_signal(number)
            assert (stop.requeue, stop.save, stop.now) == wanted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
