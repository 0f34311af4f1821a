"""Builds the stand-in of NCCL's library (fake_nccl.c)."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path


def built(path: Path) -> str:
    """The library, at `path`: a fresh copy, since what is loaded once keeps its state."""
    return str(shutil.copy(Path(_compiled().name) / "libnccl.so", path))


@cache
def _compiled() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="fake-nccl-")
    command = ["gcc", "-shared", "-fPIC", "-pthread", "-o", f"{folder.name}/libnccl.so", str(Path(__file__).with_name("fake_nccl.c"))]
    subprocess.run(command, check=True, timeout=60)
    return folder
