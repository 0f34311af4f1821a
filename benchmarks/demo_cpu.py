"""CPU time of the processes of a real run of the demo's sizes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from asyncmoe.errors import InvariantBroken
from asyncmoe.telemetry.records import read_steps
from asyncmoe.telemetry.schema import METRICS

ROLES = ("controller", "trainer", "launcher", "engine")
"""Of processes. "launcher": the supervisor, torchrun, and the `asyncmoe engine` of each server."""
_PARTS = (
    ("sglang", "engine"),
    ("torchrun", "launcher"),
    ("torch.distributed", "launcher"),
    ("asyncmoe.trainer", "trainer"),
    (" rollout ", "controller"),
)
_LIMIT_S = 500.0
_LEAST = 10
"""Observed steps that a figure needs."""
_SETTLE = 2
"""First observed steps, which are not measured."""


def demo(folder: Path, steps: int = 40) -> dict[str, Any]:
    """CPU time of a step in a real run of the demo's sizes: an engine, two trainer ranks, responses of up to 6 tokens.

    Returns:
        "controller_ms", "trainer_ms" (both ranks), "engine_ms", "all_ms": of a step; "tokens" sampled in a step.

    Raises:
        InvariantBroken: the run failed.
    """
    run_dir, log = folder / "demo", folder / "demo.log"
    settings = [f"run.dir={run_dir}", f"model.path={run_dir / 'model'}", f"run.steps={steps}", "warmup.steps=4", "warmup.batch=16"]
    command = [
        sys.executable,
        "-m",
        "asyncmoe",
        "run",
        "examples/demo.yaml",
        *settings,
        "telemetry.live=off",
        "telemetry.tensorboard=false",
    ]
    seen: list[tuple[dict[str, float], int, int]] = []
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=Path(__file__).parents[1])
        try:
            until = time.monotonic() + _LIMIT_S
            while process.poll() is None and time.monotonic() < until:
                taken = [step for step in read_steps(run_dir / METRICS) if step.phase == "rl"]
                if len(taken) > (seen[-1][2] if seen else 0):
                    seen.append((_cpu(process.pid), sum(sum((step.ages or {}).values()) for step in taken), len(taken)))
                time.sleep(0.05)
        finally:
            process.terminate()
            process.wait(60)
    if process.returncode or len(seen) < _LEAST:
        raise InvariantBroken(f"bench journal: the demo ended with status {process.returncode}: {log.read_text()[-2000:]}")
    (first, before, begin), (last, after, end) = seen[_SETTLE], seen[-2]
    spent = {f"{role}_ms": round(1e3 * (last[role] - first[role]) / (end - begin), 2) for role in ("controller", "trainer", "engine")}
    return {**spent, "all_ms": round(sum(spent.values()), 2), "tokens": round((after - before) / (end - begin))}


def role(words: Sequence[str]) -> str:
    """Return the role of a process of a run, from its command."""
    return next((role for part, role in _PARTS if part in " ".join(words)), "launcher")


def _cpu(pid: int) -> dict[str, float]:
    """CPU seconds so far of the processes that a run started, by role."""
    found = dict.fromkeys(ROLES, 0.0)
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            spent = child.cpu_times()
            found[role(child.cmdline())] += spent.user + spent.system
    return found
