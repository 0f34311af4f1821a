"""Build the extensions for the card that is there: `python -m tests.gpu.bundle.build [host] RESULT`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from asyncmoe.build import source_digests
from tests.gpu.bundle.summary import write_outcome

_THERE = "import asyncmoe.reshard._C as one, asyncmoe.trajectory._C as other; print(one.CUDA, one.SOURCES, other.SOURCES)"


def main() -> None:
    """With kernels for the card's architecture; without any for "host", or where there is no card. Another compiler's new warnings are no
    errors here. What an earlier call has built is not built again."""
    cuda = torch.cuda.is_available() and "host" not in sys.argv
    major, minor = torch.cuda.get_device_capability(0) if cuda else (0, 0)
    environment = {**os.environ, "ASYNCMOE_CUDA": "1" if cuda else "0", "ASYNCMOE_CXXFLAGS": "-Wno-error"}
    if cuda:
        environment |= {"ASYNCMOE_CUDA_ARCHS": f"{major}{minor}", "NVCC_APPEND_FLAGS": "-Xcompiler=-Wno-error"}
    if not built(cuda):
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"], env=environment, check=True)
    if not built(cuda):
        sys.exit(f"the extension {'was built without CUDA kernels' if built(False) else 'does not load'}; see the log")
    write_outcome(Path(sys.argv[-1]), {"architecture": (f"sm_{major}{minor}" if cuda else "host only, no kernels", "")})


def built(cuda: bool) -> bool:
    """Whether the extensions are there, of these sources, and with kernels if they are wanted."""
    done = subprocess.run([sys.executable, "-c", _THERE], capture_output=True, text=True, check=False)
    return done.stdout.split() in [[str(kernels), *source_digests(Path())] for kernels in {True, cuda}]


if __name__ == "__main__":
    main()
