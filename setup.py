"""Builds the extensions asyncmoe.reshard._C and asyncmoe.record._C; everything else is in pyproject.toml.

ASYNCMOE_CUDA=1 insists on the CUDA kernels, 0 leaves them out; unset, they are built where a working nvcc is found.
ASYNCMOE_CUDA_ARCHS names the architectures; by default those of 90 and 100 that nvcc knows.
ASYNCMOE_CXXFLAGS are further flags of the C++ compiler and linker (sanitizers).
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

ARCHS = ("90", "100")
RESHARD = "asyncmoe.reshard._C"
CUDA_SOURCES = ["csrc/copy.cu", "csrc/device.cu", "csrc/scales.cu"]
EXTRA_FLAGS = os.environ.get("ASYNCMOE_CXXFLAGS", "").split()


digest = runpy.run_path("asyncmoe/launch/doctor/gathering/sources.py")["digest"]
"""Of the sources in a folder: the extension keeps it, and `asyncmoe doctor` compares it with the sources that are there."""


def nvcc() -> Path | None:
    """The compiler on PATH, else the one under CUDA_HOME or /usr/local/cuda."""
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"))
    return Path(found) if found else None


def architectures(compiler: Path) -> list[str]:
    if "ASYNCMOE_CUDA_ARCHS" in os.environ:
        return os.environ["ASYNCMOE_CUDA_ARCHS"].split(";")
    listing = subprocess.run([str(compiler), "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout.split()
    return [arch for arch in ARCHS if f"compute_{arch}" in listing]


def cuda_command(compiler: Path, source: Path, target: Path) -> list[str]:
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures(compiler)]
    host = "-Xcompiler=-fPIC,-Wall,-Wextra,-Werror"
    return [str(compiler), "-c", str(source), "-o", str(target), "-std=c++17", "-O3", "-DASYNCMOE_CUDA", "-Icsrc", *codes, host]


def cuda_libraries(compiler: Path) -> Path | None:
    """The directory of the static CUDA runtime of the toolkit `compiler` belongs to."""
    listing = subprocess.run([str(compiler), "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False).stderr
    top = next((line.split("TOP=", 1)[1].strip() for line in listing.splitlines() if "TOP=" in line), str(compiler.resolve().parent.parent))
    candidates = [Path(top) / part for part in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")]
    return next((path for path in candidates if (path / "libcudart_static.a").exists()), None)


def cuda_obstacle(compiler: Path | None) -> str | None:
    """Why the kernels cannot be built here, or None when a small file compiles and the runtime is there."""
    if compiler is None:
        return "no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda"
    if cuda_libraries(compiler) is None:
        return f"{compiler} has no libcudart_static.a"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text("#include <cuda_runtime.h>\n__global__ void probe() {}\n")
        done = subprocess.run(cuda_command(compiler, source, Path(folder) / "probe.o"), capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{compiler} cannot compile a small file: {(done.stderr or done.stdout).strip()[-600:]}"


def wanted_compiler() -> Path | None:
    """nvcc when the CUDA kernels are to be built."""
    wish = os.environ.get("ASYNCMOE_CUDA", "auto")
    if wish not in ("0", "1", "auto"):
        sys.exit(f"ASYNCMOE_CUDA: got {wish!r}, expected 0, 1 or nothing")
    if wish == "0":
        return None
    compiler = nvcc()
    obstacle = cuda_obstacle(compiler)
    if obstacle is None:
        return compiler
    if wish == "1":
        sys.exit(f"ASYNCMOE_CUDA=1, but {obstacle}")
    print(f"asyncmoe: building without CUDA kernels: {obstacle}", file=sys.stderr)
    return None


class Build(build_ext):
    """Adds the objects nvcc makes to the extension that has kernels."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        compiler = wanted_compiler() if ext.name == RESHARD else None
        if compiler:
            Path(self.build_temp).mkdir(parents=True, exist_ok=True)
            for source in CUDA_SOURCES:
                target = Path(self.build_temp) / f"{Path(source).stem}.cu.o"
                command = cuda_command(compiler, Path(source), target)
                print(" ".join(command))
                subprocess.run(command, check=True)
                ext.extra_objects.append(str(target))
            ext.define_macros.append(("ASYNCMOE_CUDA", None))
            ext.library_dirs.append(str(cuda_libraries(compiler)))
            ext.libraries += ["cudart_static", "dl", "rt", "pthread"]
        super().build_extension(ext)


def extension(name: str, folder: str, depends: list[str]) -> Pybind11Extension:
    return Pybind11Extension(
        name,
        sorted(glob(f"{folder}/*.cpp")),
        depends=[*sorted(glob(f"{folder}/*.h")), *depends],
        cxx_std=17,
        define_macros=[("ASYNCMOE_SOURCES", f'"{digest(Path(folder))}"')],
        extra_compile_args=["-O3", "-Wall", "-Wextra", "-Werror", "-pthread", *EXTRA_FLAGS],
        extra_link_args=["-pthread", "-lrt", "-ldl", *EXTRA_FLAGS],
    )


ParallelCompile(default=0).install()  # 0: on every core
setup(
    ext_modules=[extension(RESHARD, "csrc", CUDA_SOURCES), extension("asyncmoe.record._C", "csrc/record", [])],
    cmdclass={"build_ext": Build},
)
