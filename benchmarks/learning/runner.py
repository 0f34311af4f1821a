"""Runs what is not recorded yet, one run after the other, and keeps the record of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncmoe import config as configuration
from asyncmoe.errors import DataError, EngineError, UserError, WaitTimeout
from benchmarks.learning import curves
from benchmarks.learning.arms import CONFIGURATION, Arm, overrides
from benchmarks.provenance import here

ROOT = Path(__file__).parents[2]
RUNS, TRL = ROOT / "build" / "learning", ROOT / ".venv-peers" / "trl"
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
            write(results, held["runs"])
            say(f"{arm.name}, seed {seed}: {record['evaluations']['accuracy']}")


def read(results: Path) -> dict[str, Any]:
    """Return the records; none if the file does not exist.

    Raises:
        DataError: it holds something else.
    """
    if not results.exists():
        return {"runs": []}
    try:
        found: Any = json.loads(results.read_text())
    except ValueError as error:
        raise DataError(str(results), got=f"no JSON ({error})", expected="results of bench learning") from None
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise DataError(str(results), got="JSON without a list of runs", expected="results of bench learning")
    return found


def write(results: Path, runs: Sequence[Mapping[str, Any]], **more: Mapping[str, Any]) -> None:
    """Write the records, a line a run, so that a change of one is a change of one line; `more` maps a name to entries, a line each."""
    parts = [
        f'"{name}": {{\n' + ",\n".join(f"{json.dumps(key)}: {_line(one)}" for key, one in of.items()) + "\n}" for name, of in more.items()
    ]
    parts.append('"runs": [\n' + ",\n".join(map(_line, runs)) + "\n]")
    part = results.with_suffix(".part")
    part.write_text("{" + ",\n".join(parts) + "}\n")
    part.replace(results)


def _line(one: object) -> str:
    return json.dumps(one, separators=(",", ":"))


def _curves(arm: Arm, seed: int, steps: int) -> dict[str, Any]:
    run_dir = RUNS / f"{arm.name}-{seed}-{steps}"
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    if arm.trl:
        return _of_trl(run_dir, seed, steps)
    given = overrides(arm, seed, run_dir, steps)
    finish(run_dir, ["-m", "asyncmoe", "run", str(CONFIGURATION), *given], arm.environment)
    found = curves.of_run(run_dir, configuration.of_run(run_dir).rollout.batch)
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return found


def _of_trl(run_dir: Path, seed: int, steps: int) -> dict[str, Any]:
    if not TRL.is_dir():
        raise UserError(str(TRL.relative_to(ROOT)), got="no TRL", expected="its packages", hint="make bench-trl, or leave out dense-trl")
    out = run_dir.with_suffix(".json")
    path = os.pathsep.join([str(TRL), str(ROOT)])
    command = ["-m", "benchmarks.learning.with_trl", str(seed), str(steps), str(out)]
    finish(run_dir, command, {"PYTHONPATH": path, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"})
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def finish(run_dir: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run Python with `command` to its end."""
    log = run_dir.with_suffix(".log")
    with log.open("ab") as output:
        given = {**os.environ, **environment}
        try:
            done = subprocess.run(
                [sys.executable, *command], cwd=ROOT, stdout=output, stderr=output, env=given, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise WaitTimeout("a run of bench learning", f"the end of {run_dir.name}", _LIMIT_S) from error
    if done.returncode:
        raise EngineError(f"{run_dir.name} ended with status {done.returncode}; its output is {log}")
