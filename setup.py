"""Builds the extensions asyncmoe.reshard._C and asyncmoe.trajectory._C; everything else is in pyproject.toml.

ASYNCMOE_CUDA=1 insists on the CUDA kernels, 0 leaves them out; unset, they are built where a working nvcc is found
(which nvcc: asyncmoe/build.py).
ASYNCMOE_CUDA_ARCHS names the architectures; by default those of 90 and 100 that nvcc knows.
ASYNCMOE_CXXFLAGS are further flags of the C++ compiler and linker (sanitizers).
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from glob import glob
from pathlib import Path
from types import SimpleNamespace

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

RESHARD = "asyncmoe.reshard._C"
CUDA_SOURCES = ["csrc/copy.cu", "csrc/delta.cu", "csrc/device.cu", "csrc/scales.cu"]
EXTRA_FLAGS = os.environ.get("ASYNCMOE_CXXFLAGS", "").split()


build = SimpleNamespace(**runpy.run_path("asyncmoe/build.py"))
"""asyncmoe.build, by path: asyncmoe cannot be imported before it is installed."""


def wanted_compiler() -> Path | None:
    """nvcc when the CUDA kernels are to be built."""
    wish = os.environ.get("ASYNCMOE_CUDA", "auto")
    if wish not in ("0", "1", "auto"):
        sys.exit(f"ASYNCMOE_CUDA: got {wish!r}, expected 0, 1 or nothing")
    if wish == "0":
        return None
    compiler: Path | None = build.nvcc()
    obstacle = build.obstacle(compiler)
    if obstacle is None:
        return compiler
    if wish == "1":
        sys.exit(f"ASYNCMOE_CUDA=1, but {obstacle}; {build.HINT}")
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
                command = build.command(compiler, Path(source), target)
                print(" ".join(command))
                subprocess.run(command, check=True)
                ext.extra_objects.append(str(target))
            ext.define_macros.append(("ASYNCMOE_CUDA", None))
            ext.define_macros.append(("ASYNCMOE_ARCHS", f'"{";".join(build.architectures(compiler))}"'))
            ext.library_dirs.append(str(build.libraries(compiler)))
            ext.libraries += ["cudart_static", "dl", "rt", "pthread"]
        super().build_extension(ext)


def extension(name: str, folder: str, depends: list[str]) -> Pybind11Extension:
    return Pybind11Extension(
        name,
        sorted(glob(f"{folder}/*.cpp")),
        depends=[*sorted(glob(f"{folder}/*.h")), *depends],
        cxx_std=17,
        define_macros=[("ASYNCMOE_SOURCES", f'"{build.digest(Path(folder))}"')],
        extra_compile_args=["-O3", "-Wall", "-Wextra", "-Werror", "-pthread", *EXTRA_FLAGS],
        extra_link_args=["-pthread", "-lrt", "-ldl", *EXTRA_FLAGS],
    )


ParallelCompile(default=0).install()  # 0: on every core
setup(
    ext_modules=[extension(RESHARD, "csrc", CUDA_SOURCES), extension("asyncmoe.trajectory._C", "csrc/trajectory", [])],
    cmdclass={"build_ext": Build},
)
