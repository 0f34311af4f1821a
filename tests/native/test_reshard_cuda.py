"""The CUDA sources compile, for every architecture that is promised. Needs nvcc, and no GPU."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import asyncmoe

ROOT = Path(asyncmoe.__file__).parents[1]
EM_CUDA = 190
"""Machine number of CUDA's code in an ELF header."""


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    """setup.py, without running it."""
    import setuptools

    spec = importlib.util.spec_from_file_location("asyncmoe_setup", ROOT / "setup.py")
    module, real = importlib.util.module_from_spec(spec), setuptools.setup
    setuptools.setup = lambda **_: None
    try:
        spec.loader.exec_module(module)
    finally:
        setuptools.setup = real
    return module


def architectures(content: bytes) -> set[int]:
    """Compute capabilities, times 10, of the CUDA code in an object file: `e_flags` of the ELF images within."""
    found, start = set(), content.find(b"\x7fELF")
    while start >= 0:
        machine, flags = struct.unpack_from("<H", content, start + 18)[0], struct.unpack_from("<I", content, start + 48)[0]
        if machine == EM_CUDA:
            found |= {flags & 0xFF, flags >> 8 & 0xFF}
        start = content.find(b"\x7fELF", start + 4)
    return found


@pytest.mark.parametrize("number", range(4))
def test_the_kernels_compile_for_hopper_and_blackwell(
    setup_py: ModuleType, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thorough: bool
) -> None:
    """Without --thorough for Hopper only: each architecture takes seconds."""
    build = setup_py.build
    compiler = build.nvcc()
    if obstacle := build.obstacle(compiler):
        pytest.skip(obstacle)
    wanted = ("90", "100") if thorough else ("90",)
    if not thorough:
        monkeypatch.setenv("ASYNCMOE_CUDA_ARCHS", "90")
    assert len(setup_py.CUDA_SOURCES) == 4
    target = tmp_path / "kernels.o"
    command = build.command(compiler, ROOT / setup_py.CUDA_SOURCES[number], target)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    listed = subprocess.run([compiler, "--list-gpu-arch"], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert {int(arch) for arch in wanted if f"compute_{arch}" in listed} <= architectures(target.read_bytes())


def test_a_build_says_whether_it_has_them() -> None:
    script = "import asyncmoe.reshard._C as c; print(c.CUDA, hasattr(c, 'DeviceProgram'), c.cuda_device_count() >= 0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() in (["True", "True", "True"], ["False", "False", "True"])
