"""The build of the extensions: digests of their sources, and the nvcc for the CUDA kernels, or the reason why there is none.

setup.py and requirements/nvcc.sh run this file by path before asyncmoe is installed, so it imports only the standard library.

usage: python asyncmoe/build.py      (prints the chosen nvcc; without one, prints the reason and exits with status 1)
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDERS = ("csrc", "csrc/trajectory")
"""Source directories of asyncmoe.reshard._C and asyncmoe.trajectory._C, relative to the checkout."""
_SUFFIXES = {".h", ".cpp", ".cu"}
ARCHS = ("90", "100")
"""Compute capabilities, times 10, that the kernels are built for unless ASYNCMOE_CUDA_ARCHS is set."""
HINT = "run: make setup GPU=1, which installs NVIDIA's package of it, or put nvcc on PATH, or set CUDA_HOME"
_PROBE_S = 120.0
_STATIC = "libcudart_static.a"


def digest(folder: Path) -> str:
    """Return the SHA-256 in hex over names and contents of the sources in a folder, excluding subfolders.

    An extension keeps the digest of its sources, and `asyncmoe doctor` compares it with the sources of the checkout.
    """
    found = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES):
        content = file.read_bytes()
        found.update(f"{file.name} {len(content)}\n".encode() + content)
    return found.hexdigest()


def source_digests(checkout: Path) -> tuple[str, ...]:
    """Return the digests of a checkout's `FOLDERS`; empty without sources, as in an installed wheel."""
    folders = [checkout / folder for folder in FOLDERS]
    return tuple(digest(folder) for folder in folders) if all(folder.is_dir() for folder in folders) else ()


def compilers() -> list[Path]:
    """Return every nvcc in order of preference: in CUDA_HOME, in the packages of this Python, on PATH, in /usr/local/cuda.

    The packaged nvcc (nvidia-cuda-nvcc) precedes the machine's, because it has torch's CUDA version.
    """
    packaged = [folder for entry in sys.path for folder in (Path(entry) / "nvidia").glob("cu*") if re.fullmatch(r"cu\d+", folder.name)]
    packaged.sort(key=lambda folder: int(folder.name[2:]), reverse=True)  # the newest CUDA first
    homes = [os.environ.get("CUDA_HOME"), *packaged]
    found = [shutil.which("nvcc", path=path) for path in (*(f"{home}/bin" for home in homes if home), None, "/usr/local/cuda/bin")]
    return list(dict.fromkeys(Path(path) for path in found if path))


def nvcc() -> Path | None:
    """Return the first compiler that can build the kernels, else the first compiler, else None."""
    found = compilers()
    return next((compiler for compiler in found if obstacle(compiler) is None), found[0] if found else None)


def architectures(compiler: Path) -> list[str]:
    """Return the architectures of ASYNCMOE_CUDA_ARCHS, else the supported ones of ARCHS."""
    if "ASYNCMOE_CUDA_ARCHS" in os.environ:
        return os.environ["ASYNCMOE_CUDA_ARCHS"].split(";")
    listing = _run([str(compiler), "--list-gpu-arch"]).stdout.split()
    return [arch for arch in ARCHS if f"compute_{arch}" in listing]


def command(compiler: Path, source: Path, target: Path) -> list[str]:
    """Return the command that compiles a .cu file of the extension."""
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures(compiler)]
    host = "-Xcompiler=-fPIC,-Wall,-Wextra,-Werror"
    return [str(compiler), "-c", str(source), "-o", str(target), "-std=c++17", "-O3", "-DASYNCMOE_CUDA", "-Icsrc", *codes, host]


def libraries(compiler: Path) -> Path | None:
    """Return the directory of the static CUDA runtime of `compiler`'s toolkit; NVIDIA's packages have it in `lib`."""
    listing = _run([str(compiler), "--dryrun", "-x", "cu", "/dev/null"]).stderr
    top = next((line.split("TOP=", 1)[1].strip() for line in listing.splitlines() if "TOP=" in line), str(compiler.resolve().parent.parent))
    candidates = [Path(top) / part for part in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")]
    return next((path for path in candidates if (path / _STATIC).exists()), None)


@functools.cache
def obstacle(compiler: Path | None) -> str | None:
    """Return why the kernels cannot be built, or None if a small file compiles and the runtime is present."""
    if compiler is None:
        return "no nvcc in CUDA_HOME, in this Python's packages, on PATH or in /usr/local/cuda"
    try:
        if libraries(compiler) is None:
            return f"{compiler} has no {_STATIC}"
        if not architectures(compiler):
            return f"{compiler} knows none of the architectures {', '.join(ARCHS)}"
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cu"
            source.write_text("#include <cuda_runtime.h>\n__global__ void probe() {}\n")
            done = _run(command(compiler, source, Path(folder) / "probe.o"))
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} cannot be run: {error}"
    return None if done.returncode == 0 else f"{compiler} cannot compile a small file: {(done.stderr or done.stdout).strip()[-600:]}"


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=_PROBE_S)


def main() -> None:
    """Print the chosen compiler, or exit with the reason why there is none."""
    found = nvcc()
    trouble = obstacle(found)
    if trouble is not None:
        sys.exit(f"nvcc: got none that builds the CUDA kernels ({' '.join(trouble.split())}), expected nvcc of CUDA 12 or newer; {HINT}")
    print(f"CUDA kernels are built with {found}")


if __name__ == "__main__":
    main()
