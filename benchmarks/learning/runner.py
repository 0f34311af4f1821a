"""Runs what is not recorded yet, one run after the other, and keeps the record of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncmoe import config as configuration
from asyncmoe.errors import EngineError, UserError, WaitTimeout
from benchmarks.learning import curves
from benchmarks.learning.arms import CONFIGURATION, Arm, overrides
from benchmarks.provenance import here

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "build" / "learning"
_LIMIT_S = 7200.0
"""Of one run, from one start to its end."""


def run(arms: Sequence[Arm], seeds: Sequence[int], steps: int, results: Path, minutes: float, say: Callable[[str], None]) -> None:
    """Add to `results` what it lacks, seed after seed, all arms of each. Begins no further run after so many minutes.

    Raises:
        UserError: a model is missing.
        EngineError: a run failed; its output is below build/learning.
        WaitTimeout: a run did not end.
    """
    for model in sorted({arm.model for arm in arms}):
        if not (ROOT / model / "config.json").is_file():
            raise UserError(str(model), got="no model", expected="a model directory", hint="docs/guides/upcycling.md says how to make it")
    until = time.monotonic() + 60 * minutes
    for seed in seeds:
        for arm in arms:
            held = read(results)
            if any((one["arm"], one["seed"], one["steps"]) == (arm.name, seed, steps) for one in held["runs"]):
                continue
            if time.monotonic() > until:
                return
            say(f"{arm.name}, seed {seed}")
            record = {"arm": arm.name, "seed": seed, "steps": steps, **here(), **_curves(arm, seed, steps)}
            held["runs"].append(record)
            _write(results, held)
            say(f"{arm.name}, seed {seed}: {record['evaluations']['accuracy']}")


def read(results: Path) -> dict[str, Any]:
    """Return the records; none if the file does not exist."""
    found: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"runs": []}
    return found


def _write(results: Path, held: dict[str, Any]) -> None:
    """A line a run, so that a change of one is a change of one line."""
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in held["runs"])
    part = results.with_suffix(".part")
    part.write_text(f'{{"runs": [\n{lines}\n]}}\n')
    part.replace(results)


def _curves(arm: Arm, seed: int, steps: int) -> dict[str, Any]:
    run_dir = RUNS / f"{arm.name}-{seed}-{steps}"
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    given = overrides(arm, seed, run_dir, steps)
    command = [sys.executable, "-m", "asyncmoe", "run", str(CONFIGURATION), *given]
    with run_dir.with_suffix(".log").open("ab") as log:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **arm.environment}, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise WaitTimeout("asyncmoe run", f"the end of {run_dir.name}", _LIMIT_S) from error
    if done.returncode:
        raise EngineError(f"{run_dir.name} ended with status {done.returncode}; its output is {run_dir.with_suffix('.log')}")
    config = configuration.of_run(run_dir)
    found = curves.of_run(run_dir, config.rollout.batch)
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return found
