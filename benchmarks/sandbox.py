"""What a call of the tool python costs: each way to confine an empty program, in turn, next to Python alone.

CPU seconds are those of all processes of a call; on a busy machine they say more than the wall clock's. The controller's own are left out.
"""

from __future__ import annotations

import json
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from asyncmoe.errors import ConfigError, InvariantBroken
from asyncmoe.rollout.episodes.tools import seccomp
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes.guarded import GUARD, Guarded, settings
from asyncmoe.rollout.episodes.tools.sandboxes.kernel_support import landlock_version
from asyncmoe.rollout.episodes.tools.sandboxes.own import Own
from asyncmoe.rollout.episodes.tools.sandboxes.python_files import python_files
from benchmarks.provenance import here

_LIMIT_S = 60.0
Command = Callable[[str], list[str]]
"""From a directory to a command line, which runs the program on its standard input."""


def run(rounds: int = 40) -> dict[str, Any]:
    """Run an empty program `rounds` times in each way that this machine offers.

    Returns:
        {"date", "machine", "load", "rounds", "cases", "refused"}. "refused": {name: reason}. Of a case: "name", medians "cpu_ms" and
        "wall_ms" of a call, and "more_ms", the median over rounds of its CPU time minus that of Python alone in the
        same round. Cases: "python" alone; the "guard" without a root of its own; with "landlock"; with a "root", the default.
    """
    measured_at = here()
    ways, refused = _ways()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, command in ways.items():
            taken[name].append(_call(name, command))
    alone = [cpu for cpu, _ in taken["python"]]
    cases = [
        {
            "name": name,
            "cpu_ms": round(1e3 * median(cpu for cpu, _ in found), 1),
            "wall_ms": round(1e3 * median(wall for _, wall in found), 1),
            "more_ms": round(1e3 * median(cpu - other for (cpu, _), other in zip(found, alone, strict=True)), 1),
        }
        for name, found in taken.items()
    ]
    return {**measured_at, "rounds": rounds, "cases": cases, "refused": refused}


def table(found: dict[str, Any]) -> str:
    """A line a case."""
    lines = [f"{'':<12}{'CPU ms':>8}{'wall ms':>9}{'CPU ms beyond Python':>22}"]
    lines += [f"{case['name']:<12}{case['cpu_ms']:8.1f}{case['wall_ms']:9.1f}{case['more_ms']:22.1f}" for case in found["cases"]]
    return "\n".join([*lines, *(f"{name}: {why}" for name, why in found["refused"].items())])


def _ways() -> tuple[dict[str, Command], dict[str, str]]:
    limits, python = PythonLimits(), python_files().python
    given = settings(limits, seccomp.program().hex(), python, "/tmp")
    ways: dict[str, Command] = {
        "python": lambda _: [python, "-I", "-S", "-X", "utf8", "-"],
        "guard": lambda _: [python, "-I", "-S", str(GUARD), json.dumps(given)],
    }
    if landlock_version():
        ways["landlock"] = Own(replace(limits, namespaces=False)).command
    refused = {} if landlock_version() else {"landlock": "the kernel has none"}
    try:
        Guarded(limits, Own(limits)).probe()
        ways["root"] = Own(limits).command
    except ConfigError as error:
        refused["root"] = str(error)
    return ways, refused


def _call(name: str, command: Command) -> tuple[float, float]:
    """Run an empty program and return its CPU and wall-clock seconds."""
    with tempfile.TemporaryDirectory() as directory:
        line, before, start = command(directory), resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(line, input=b"print('ready')", cwd=directory, env={}, capture_output=True, timeout=_LIMIT_S, check=False)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.stdout != b"ready\n":
        raise InvariantBroken(f"bench sandbox: {name}: {(done.stdout + done.stderr)[-500:].decode(errors='replace')}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall
