"""Parts of the GPU bundle that also run on a CPU, in small; each checks its own results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = {
    ("whole_update",): "digests_equal",
    ("slice", "local"): "full_loss",
    ("head",): "peak",
    ("deterministic_steps", "local"): "digest_share",
}


@pytest.mark.parametrize(("part", "found"), PARTS.items())
def test_a_part_runs_without_a_gpu(tmp_path: Path, part: tuple[str, ...], found: str) -> None:
    name, *arguments = part
    command = [sys.executable, "-m", f"tests.gpu.bundle.{name}", *arguments, str(tmp_path / "result.json")]
    subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parents[2])
    told = json.loads((tmp_path / "result.json").read_text())
    assert (told["skipped"], found in told["figures"]) == ("", True), told
