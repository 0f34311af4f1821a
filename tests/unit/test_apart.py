"""Tests that import Megatron, in a process of their own: what it is given on a CPU changes torch for all that runs beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(str(path) for path in (TESTS / "apart").glob("[a-z]*.py"))


def test_apart() -> None:
    assert len(FILES) >= 5
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.fail(done.stdout[-6000:] + done.stderr[-2000:], pytrace=False)
