"""What calls found, as it is written to summary.json. Only the standard library is imported here.

    {"schema": 2, "date": "2026-11-22", "commit": "...", "calls": {"updates": 142.1},
     "machine": {"card": "NVIDIA H200", "driver": ..., "cuda": ..., "torch": ..., "nccl": ..., "python": ..., "cores": ...},
     "parts": {"kernels": {"status": "ok", "reason": "", "seconds": 31.0, "limit_seconds": 70,
                           "figures": {"passed": {"value": 61, "unit": "tests"}}}}}

"calls" has the seconds that each call took when it last ran. A status is ok, failed or skipped; the reason of the latter two is a line.
Documentation cites a figure by its place, e.g.
`parts.update.figures.full_stage.value`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 2
MACHINE = ("card", "driver", "cuda", "torch", "nccl", "python", "cores")
"""Keys of "machine"; a value is null where the machine has no such thing."""


def write_outcome(file: Path, figures: Mapping[str, tuple[Any, str]], skipped: str = "") -> None:
    """Write a part's own result; figures: name -> (value, unit)."""
    named = {name: {"value": value, "unit": unit} for name, (value, unit) in figures.items()}
    file.write_text(json.dumps({"skipped": skipped, "figures": named}))
