"""Build the extensions for the card that is there: `python -m tests.gpu.bundle.build RESULT`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.gpu.bundle.summary import write_outcome


def main() -> None:
    """With kernels for the card's architecture; without any where there is no card. Another compiler's new warnings are no errors here."""
    cuda = torch.cuda.is_available()
    major, minor = torch.cuda.get_device_capability(0) if cuda else (0, 0)
    architecture = f"{major}{minor}"
    environment = {**os.environ, "ASYNCMOE_CUDA": "1" if cuda else "0", "ASYNCMOE_CXXFLAGS": "-Wno-error"}
    if cuda:
        environment |= {"ASYNCMOE_CUDA_ARCHS": architecture, "NVCC_APPEND_FLAGS": "-Xcompiler=-Wno-error"}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], env=environment, check=True)
    import asyncmoe.reshard._C as _C

    if cuda and not _C.CUDA:
        sys.exit("the extension was built without CUDA kernels")
    write_outcome(Path(sys.argv[1]), {"architecture": (f"sm_{architecture}" if cuda else "no device, no kernels", "")})


if __name__ == "__main__":
    main()
