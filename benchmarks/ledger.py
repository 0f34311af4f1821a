"""What the controller costs a trajectory when rollout workers do the rest, and what a trajectory costs that a worker holds.

The controller is the real one's fleet, producer, queue and log, in a process of its own. Its workers only answer, all from one other
process, which also leases and commits as a trainer's rank does. Everything travels over TCP, encrypted, as between machines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from asyncmoe.errors import InvariantBroken
from benchmarks.ledger_case import LedgerCase
from benchmarks.provenance import here

_TIMEOUT_S = 900.0
CASES: Mapping[str, LedgerCase] = {f"workers_{workers}": LedgerCase(workers) for workers in (1, 4, 16)}
HELD, TOKENS = 100, 32_768


def run(rounds: int = 3, shrink: int = 1) -> dict[str, Any]:
    """Measure all cases in turn, then what a worker holds.

    Args:
        rounds: measurements of each case; that with the least CPU time counts, because whatever runs beside only adds to it.
        shrink: divides the numbers of trajectories, of a trial.

    Returns:
        "date", "machine", "load"; for each of `CASES` what `ledger_case.controller` returns; "held": as `ledger_case.held`.

    Raises:
        InvariantBroken: a case failed.
    """
    found: dict[str, Any] = here()
    for name, case in CASES.items():
        small = replace(case, groups=max(case.groups // shrink, 2))
        found[name] = min((_measured({"case": asdict(small)}) for _ in range(rounds)), key=lambda one: float(one["cpu_us_per_trajectory"]))
    found["held"] = _measured({"held": max(HELD // shrink, 2), "tokens": TOKENS})
    return found


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    lines = [f"{'workers':>8}{'CPU us a trajectory':>21}{'a second of a core':>20}{'idle, share of a core':>23}"]
    for name in CASES:
        one = results[name]
        lines.append(
            f"{name.removeprefix('workers_'):>8}{one['cpu_us_per_trajectory']:>21,.0f}{1e6 / one['cpu_us_per_trajectory']:>20,.0f}"
            f"{one['idle_cores']:>22.1%}"
        )
    one = results["held"]
    return "\n".join(
        [*lines, f"a worker that holds {one['trajectories']} trajectories of {one['tokens']:,} tokens: {one['MB_each']:.2f} MB each"]
    )


def _measured(values: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.ledger_case", json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise InvariantBroken(f"bench ledger: {values}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))
