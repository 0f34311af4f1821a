"""The example that needs NumPy alone, under both launchers; and MPI's time-outs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "reshard_standalone.py")


def run(command: list[str]) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_under_torchrun() -> None:
    out = run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", EXAMPLE])
    assert out.count("all is right") == 4


def mpirun() -> list[str]:
    found = shutil.which("mpirun")
    if found is None or subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, check=False).returncode:
        pytest.skip("mpi4py or an MPI library is missing")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return [found, *(["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version else [])]


def test_under_mpirun() -> None:
    out = run([*mpirun(), "-n", "4", sys.executable, EXAMPLE])
    assert out.count("all is right") == 4


WAITING = """
import sys
from asyncmoe.errors import WaitTimeout
from asyncmoe.reshard.mpi_transport import MpiTransport
transport = MpiTransport()
if transport.rank == 0:
    try:
        transport.exchange([], [(1, transport.empty(8))], timeout_s=0.5)
    except WaitTimeout as error:
        print("timed out:", error, flush=True)
    from mpi4py import MPI
    MPI.COMM_WORLD.Abort(0)
else:
    import time
    time.sleep(60)
"""


def test_mpi_times_out_and_names_the_rank() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [*mpirun(), "-n", "2", sys.executable, "-c", WAITING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=environment)
    assert "timed out: waited 0.5 s for rank 1: its message" in done.stdout
