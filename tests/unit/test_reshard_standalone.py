"""The example that needs NumPy alone, under both launchers; and MPI's time-outs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.doc_pages import ROOT, blocks

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
    out = run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE])
    assert out.count("all is right") == 2


def test_the_program_of_the_guide(tmp_path: Path) -> None:
    (program,) = [block.text for block in blocks((ROOT / "docs" / "guides" / "reshard.md").read_text()) if block.word == "python"]
    (tmp_path / "program.py").write_text(program)
    assert run([sys.executable, str(tmp_path / "program.py")]) == "[1. 1. 2. 2. 1. 2.]\n"


def mpirun() -> list[str]:
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None or subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, check=False).returncode:
        pytest.skip("mpi4py or an MPI library is missing")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return [found, *(["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version else [])]


def test_under_mpirun() -> None:
    out = run([*mpirun(), "-n", "4", sys.executable, EXAMPLE])
    assert out.count("all is right") == 4


WAITING = """
import sys
from pathlib import Path
from asyncmoe.errors import WaitTimeout
from asyncmoe.reshard.mpi_transport import MpiTransport
transport = MpiTransport()
if transport.rank == 0:
    try:
        transport.exchange([], [(1, transport.empty(8))], timeout_s=0.5)
    except WaitTimeout as error:
        Path(sys.argv[1]).write_text(str(error))  # the launcher may lose what is printed before an abort
    from mpi4py import MPI
    MPI.COMM_WORLD.Abort(0)
else:
    import time
    time.sleep(60)
"""


def test_mpi_times_out_and_names_the_rank(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    said = tmp_path / "said"
    command = [*mpirun(), "-n", "2", sys.executable, "-c", WAITING, str(said)]
    subprocess.run(command, capture_output=True, timeout=50, check=False, env=environment)
    assert said.read_text() == "waited 0.5 s for rank 1: its message"


ALONE = """
import sys
for name in ("torch", "megatron", "sglang", "transformers", "mpi4py", "cupy"):
    sys.modules[name] = None  # importing it is an ImportError from here on
import numpy as np
import asyncmoe.reshard as reshard
from asyncmoe.reshard import Box, LayoutBuilder, LocalTransport

held, wanted = LayoutBuilder(0, "float32"), LayoutBuilder(0, "float32")
held.stack("s", [("a", Box((0, 0), (4, 6))), ("b", Box((0, 0), (2, 6)))])
wanted.stack("left", [("b", Box((0, 0), (2, 3))), ("a", Box((0, 0), (4, 3)))])
wanted.stack("right", [("a", Box((0, 3), (4, 3)))])
made = reshard.plan({"a": (4, 6), "b": (2, 6)}, [held.build()], [wanted.build()])
values = np.arange(36, dtype=np.float32).reshape(6, 6)
got = {"left": np.zeros((6, 3), np.float32), "right": np.zeros((4, 3), np.float32)}
reshard.exchange(made, LocalTransport(), {"s": values}, got)
np.testing.assert_array_equal(got["left"], np.concatenate([values[4:, :3], values[:4, :3]]))
np.testing.assert_array_equal(got["right"], values[:4, 3:])
present = sorted(name for name in ("torch", "megatron", "sglang") if sys.modules.get(name) is not None)
print("all is right, without", present)
"""


def test_with_numpy_alone() -> None:
    assert "all is right, without []" in run([sys.executable, "-c", ALONE])
