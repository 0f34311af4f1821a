"""Parts of the GPU bundle that also run on a CPU, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_update_of_a_whole_model_between_two_processes(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    subprocess.run(
        [sys.executable, "-m", "tests.gpu.bundle.whole_update", str(result)], check=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert json.loads(result.read_text())["figures"]["digests_equal"]["value"] == 3
