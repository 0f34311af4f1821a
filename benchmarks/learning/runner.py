"""Runs what is not recorded yet, one run after the other, and keeps the record of each."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from asyncmoe import config as configuration
from asyncmoe.errors import DataError, EngineError, UserError, WaitTimeout
from benchmarks.learning import curves
from benchmarks.learning.arms import DEMO, DENSE, MIXTURE, Arm, overrides
from benchmarks.provenance import here

ROOT = Path(__file__).parents[2]
RUNS, TRL = ROOT / "build" / "learning", ROOT / ".venv-peers" / "trl"
MADE_BY = {
    DENSE: "make real-model",
    MIXTURE: f"python examples/real/make_mixture.py {DENSE} {MIXTURE}",
    DEMO: f"asyncmoe make-model {DEMO}",
}
_LIMIT_S = 7200.0
"""Of one run, from one start to its end."""


def run(arms: Sequence[Arm], seeds: Sequence[int], steps: int, results: Path, minutes: float, say: Callable[[str], None]) -> None:
    """Add to `results` what it lacks, seed after seed, all arms of each. Begins no further run after so many minutes.

    Raises:
        UserError: a model is missing, or `results` cannot be written.
        DataError: `results` is something else.
        EngineError: a run failed; its output is below build/learning.
        WaitTimeout: a run did not end.
    """
    check_writable(results, "--json")
    if math.isnan(minutes):
        raise UserError("--minutes", got="nan", expected="a number")
    done = {(one["arm"], one["seed"], one["steps"]) for one in read(results)["runs"]}
    missing = [(arm, seed) for seed in seeds for arm in arms if (arm.name, seed, steps) not in done] if minutes else []
    for model in sorted({arm.model for arm, _ in missing}):
        check_model(model, ",".join(sorted({arm.name for arm, _ in missing if arm.model == model})))
    if any(arm.trl for arm, _ in missing) and not TRL.is_dir():
        raise UserError(str(TRL.relative_to(ROOT)), got="no TRL", expected="its packages", hint="make bench-trl, or leave out dense-trl")
    until = time.monotonic() + 60 * minutes
    for arm, seed in missing:
        if time.monotonic() > until:
            return
        held = read(results)
        say(f"{arm.name}, seed {seed}")
        record = {"arm": arm.name, "seed": seed, "steps": steps, **here(), **_curves(arm, seed, steps)}
        held["runs"].append(record)
        write(results, held["runs"])
        say(f"{arm.name}, seed {seed}: {record['evaluations']['accuracy']}")


def check_model(model: Path, names: str) -> None:
    """Raise UserError if the model of the arms of these names is not there."""
    if not (ROOT / model / "config.json").is_file():
        raise UserError(str(model), got="no model", expected=f"one for {names}", hint=MADE_BY[model])


def check_writable(path: Path, option: str) -> None:
    """Refuse a place for a file in which none can be written, before hours of runs. Raises UserError."""
    if path.is_dir():
        raise UserError(option, got=f"{path}, a folder", expected="a file")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(option, got=f"{path} ({error.strerror})", expected="a file in a folder that can be written") from None


def read(results: Path, kept: Set[str] = frozenset({"arm", "seed", "steps", "evaluations"})) -> dict[str, Any]:
    """Return the records; none if the file does not exist.

    Args:
        kept: what each record has, at least.

    Raises:
        DataError: it holds something else.
    """
    if not results.exists():
        return {"runs": []}
    try:
        found: Any = json.loads(results.read_text())
    except ValueError as error:
        raise DataError(str(results), got=f"no JSON ({error})", expected="results of bench learning") from None
    runs = found.get("runs") if isinstance(found, dict) else None
    if not isinstance(runs, list) or not all(isinstance(one, dict) and one.keys() >= kept for one in runs):
        raise DataError(str(results), got="JSON without such runs", expected="results of bench learning")
    return {**found, "runs": runs}


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
    whole = run_dir / "whole.json"  # of a run that has ended, which other results may take too
    if not whole.exists():
        resumed = run_dir.exists()
        finish(run_dir, ["-m", "asyncmoe", "run", str(arm.configuration), *given], arm.environment)
        whole.write_text(json.dumps({"resumed": True} if resumed else {}))
    found = curves.of_run(run_dir, configuration.of_run(run_dir).rollout.batch)
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return {**found, **json.loads(whole.read_text())}


def _of_trl(run_dir: Path, seed: int, steps: int) -> dict[str, Any]:
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
