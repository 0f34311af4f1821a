"""Small processes, which a run starts often, load no package that they do not use: it would be most of their start."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"aiohttp", "numpy", "pydantic", "torch", "yaml"}
MODULES = ("rollout.process_worker", "rollout.scoring.workers", "launch.slurm.task", "launch.torchrun", "telemetry.loggers")


def test_modules_of_small_processes_load_nothing_heavy() -> None:
    imports = ", ".join(f"asyncmoe.{module}" for module in MODULES)
    command = [sys.executable, "-c", f"import sys, {imports}; print(*{HEAVY!r} & sys.modules.keys())"]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout == "\n"
