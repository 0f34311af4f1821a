"""What runs inside a step: its log, the signal by which it is asked to stop, and the status of torchrun's ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.slurm import task
from asyncmoe.launch.slurm.command import Stop

ROOT = Path(__file__).parents[2]


def start(tmp: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "asyncmoe.launch.slurm.task", str(tmp), *arguments],
        cwd=ROOT,
        env={**os.environ, "SLURMD_NODENAME": "n7"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ranks_that_meet_a_mistake_of_the_user_end_the_step_with_its_status(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start(tmp_path, "trainer", "trainer", str(tmp_path / "none.yaml"), "n7", "1", "127.0.0.1", str(port), "0")
    printed = process.communicate(timeout=120)[0]
    said = (tmp_path / "trainer.n7.log").read_text()
    assert process.returncode == 2, said
    assert f"error: trainer.0 on n7: {tmp_path / 'none.yaml'}: got no such file" in said
    assert printed == ""


def test_a_part_that_fails_says_so_in_the_log_of_its_node(tmp_path: Path) -> None:
    process = start(tmp_path, "controller", "rollout", str(tmp_path / "none.yaml"), "0")
    assert (process.wait(60), process.communicate()[0]) == (2, "")
    assert "error: " in (tmp_path / "controller.n7.log").read_text()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AsyncmoeError, match=f"port {port}, where the trainer's ranks meet: got one in use"):
            task.check_free(port)
    task.check_free(port)


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
from asyncmoe.launch import part
from asyncmoe.launch.slurm import task
def main(run):
    child, heard = subprocess.Popen(["sleep", "60"]), []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    for number, pid in ((signal.SIGTERM, child.pid), (signal.SIGTERM, os.getpid()), (signal.SIGURG, os.getpid())):
        os.kill(pid, number)
        time.sleep(0.5)
        print(len(heard), child.poll(), flush=True)
    child.kill()
part.main = main
task.main()
"""


@pytest.mark.parametrize(
    ("role", "status", "said"),
    [("rollout", 0, "0 None\n1 None\n1 None\n"), ("engine", 0, "0 None\n0 None\n1 None\n"), ("joining", -signal.SIGTERM, "0 -15\n")],
)
def test_sigterm_warns_the_controller_once_and_ends_only_engines_of_other_jobs(tmp_path: Path, role: str, status: int, said: str) -> None:
    arguments = ["none.yaml", "0", *(() if role == "rollout" else ("0", "0"))]
    command = [sys.executable, "-c", WARNED, str(tmp_path), "step", role, *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "SLURMD_NODENAME": "n7"}, check=False, timeout=60)
    assert (done.returncode, (tmp_path / "step.n7.log").read_text()) == (status, said)


def test_ranks_that_hear_no_sigterm_are_ended_at_once(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import os, sys, time; time.sleep(300 * int(os.environ['RANK'])); sys.exit(3)")
    code = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); from asyncmoe.launch import torchrun as t; "
    code += "t.run(t.arguments_of(2, ('127.0.0.1', t.free_port('127.0.0.1')), 'one'))"
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
