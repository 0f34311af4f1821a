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


ALONE = """import sys
for name in ("torch", "megatron", "sglang", "transformers", "mpi4py", "cupy"):
    sys.modules[name] = None  # importing it is an ImportError from here on
"""


def test_the_program_of_the_guide_with_numpy_alone(tmp_path: Path) -> None:
    (program,) = [block.text for block in blocks((ROOT / "docs" / "guides" / "reshard.md").read_text()) if block.word == "python"]
    (tmp_path / "program.py").write_text(ALONE + program)
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
