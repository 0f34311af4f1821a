"""The extension under AddressSanitizer and UndefinedBehaviorSanitizer: its unit tests, in a build of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.thorough]
SCRIPT = Path(__file__).parents[1] / "sanitize.sh"
NO_RUNTIME = 77
"""What the script ends with where the compiler has no sanitizers."""


def test_the_extension_is_clean() -> None:
    if shutil.which("gcc") is None or sys.platform != "linux":
        pytest.skip("needs gcc on Linux")
    command = ["bash", str(SCRIPT), "address,undefined"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    if done.returncode == NO_RUNTIME:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "address,undefined: clean" in done.stdout
