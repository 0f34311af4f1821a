"""Small file systems, to be filled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount(place: Path, size: str) -> str:
    """Mount a new file system of `size` ("8m") at `place`; why not, if not."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


@contextmanager
def mounted(place: Path, size: str) -> Iterator[Path]:
    """A new file system at `place`. Skips the test where none can be mounted (it takes root)."""
    place.mkdir()
    if why := mount(place, size):
        pytest.skip(f"a file system cannot be mounted here: {why}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
