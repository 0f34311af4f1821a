"""What machine this is: `python -m tests.gpu.bundle.facts RESULT`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from tests.gpu.bundle.summary import write_outcome

_ASK_S = 15.0


def main() -> None:
    """Write card, driver, versions, cores, memory, peer access and which tools there are."""
    cuda = torch.cuda.is_available()
    found: dict[str, tuple[Any, str]] = {
        "card": (torch.cuda.get_device_name(0) if cuda else None, ""),
        "capability": (".".join(map(str, torch.cuda.get_device_capability(0))) if cuda else None, ""),
        "cards": (torch.cuda.device_count(), "GPUs"),
        "memory": (torch.cuda.mem_get_info(0)[1] if cuda else None, "bytes"),
        "memory_free": (torch.cuda.mem_get_info(0)[0] if cuda else None, "bytes"),
        "driver": (_smi("driver_version"), ""),
        "cuda": (torch.version.cuda, ""),
        "torch": (torch.__version__, ""),
        "nccl": (".".join(map(str, torch.cuda.nccl.version())) if cuda else None, ""),
        "python": (platform.python_version(), ""),
        "cores": (len(os.sched_getaffinity(0)), "cores"),
        "nvcc": (_nvcc(), ""),
        "compiler": (shutil.which(os.environ.get("CXX", "g++")), ""),
        "python_headers": (Path(sysconfig.get_path("include"), "Python.h").exists(), ""),
        "compute_sanitizer": (shutil.which("compute-sanitizer"), ""),
        "peer_access": (_peers(), ""),
    }
    write_outcome(Path(sys.argv[1]), found)


def _smi(field: str) -> str | None:
    """A field of the first card, as the driver's own tool says it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def _nvcc() -> str | None:
    compiler = shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"))
    if compiler is None:
        return None
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_ASK_S, check=False)
    return next((line.strip() for line in done.stdout.splitlines() if "release" in line), compiler)


def _peers() -> str:
    """ "all", "none" or the pairs between which there is none; "one card" where there are no pairs."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    missing = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if not pairs:
        return "one card" if count else "no card"
    return "all" if not missing else "none" if len(missing) == len(pairs) else "all but " + ", ".join(missing)


if __name__ == "__main__":
    main()
