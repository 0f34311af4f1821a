"""What machine this is: `python -m tests.gpu.bundle.facts RESULT`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.gpu.bundle.summary import write_outcome

_ASK_S = 15.0


def main() -> None:
    """Write card, driver, versions, cores and memory."""
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
    }
    write_outcome(Path(sys.argv[1]), found)


def _smi(field: str) -> str | None:
    """A field of the first card, as the driver's own tool says it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


if __name__ == "__main__":
    main()
