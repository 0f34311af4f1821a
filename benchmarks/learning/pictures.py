"""The figures of the documentation: curves of all arms with 95 % intervals over the seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.learning import figures


def pictures(results: Mapping[str, Any], folder: Path) -> None:
    """Write learning-dense.svg and learning-moe.svg, of the arms there are in `results`, as `runner.read` returns them."""
    runs = figures.by_arm(results["runs"])
    for front, panels in (("dense", figures.DENSE), ("moe", figures.MIXTURE)):
        if drawn := figures.svg({name: those for name, those in runs.items() if name.startswith(front)}, panels):
            (folder / f"learning-{front}.svg").write_text(drawn)
