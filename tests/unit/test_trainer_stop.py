"""A trainer that is stopped while engines start has saved the end of its warm-up, and leaves gracefully; after the last step its version is
evaluated, unless it was before, and a failed evaluation has no other effect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WARM_UP = ["Hello", "Commit", "record", "Commit", "record", "Saved", "begin"]
STEP = ["Commit", "begin", "record"]


def test_the_end_of_a_warm_up_is_saved_before_it_is_published() -> None:
    command = [sys.executable, "-m", "tests.unit.trainer_stops"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "Publisher": [*WARM_UP, "Goodbye", "close"],
        "AtOnce": [*WARM_UP, "Goodbye", "close"],
        "recorded": ["Hello", "begin", *STEP, *STEP, "Saved", "Commit", "record", "Saved", "Goodbye", "close"],
        "resumed": ["Hello", "begin", "Goodbye", "close"],
        "failing": [*WARM_UP, "failed"],
        "last": {
            "Willing": ["Hello", "Evaluations 5", "begin", "Evaluations 5", "Evaluations 5", "Goodbye", "close"],
            "AtOnce": ["Hello", "Evaluations 5", "begin", "Goodbye", "close"],
            "known": ["Hello", "Evaluations 5", "Goodbye", "close"],
        },
    }
