"""The part of the GPU bundle that is a whole run also runs on a CPU, in small; it checks its own results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.runs import REPOSITORY

pytestmark = pytest.mark.system


def test_a_colocated_run_needs_no_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.bundle.colocated", str(tmp_path / "result.json")]
    subprocess.run(command, check=True, timeout=200, cwd=REPOSITORY)
    figures = json.loads((tmp_path / "result.json").read_text())["figures"]
    assert figures["switches"]["value"] == 4
    assert {"given_back", "asleep_growth", "load_rate", "update", "waking"} <= figures.keys()
