"""How fast one process receives generations: tokens per second of CPU time, event-loop lag, memory of long trajectories, turns of agents.

The process runs the real pool, client, episodes, producer, validation and queue, and commits its own leases. The engines are
stand-ins in separate processes, with prerendered replies (`benchmarks.intake_server`); the tokenizer does nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from asyncmoe.errors import InvariantBroken
from benchmarks.intake_case import IntakeCase
from benchmarks.provenance import here

_TIMEOUT_S = 900.0
_ENGINES = 2
LONG = 32_768

CASES: Mapping[str, tuple[IntakeCase, float]] = {
    "routes_256": (IntakeCase("rate", 256, count=1024), 0.0),
    "routes_2048": (IntakeCase("rate", 2048, count=1024), 0.0),
    "plain_256": (IntakeCase("rate", 256, routes=False, count=2048), 0.0),
    "long_16": (IntakeCase("rate", 16, new=LONG, count=24), 0.0),
    "paced_256": (IntakeCase("rate", 256, count=512), 256 * 1024 / 200e3),
    "paced_1x256": (IntakeCase("rate", 256, count=1536, watched=False), 256 * 1024 / 200e3),
    "paced_2x128": (IntakeCase("rate", 128, count=768, watched=False), 256 * 1024 / 200e3),
    "paced_long_16": (IntakeCase("rate", 16, new=LONG, count=16), 16 * LONG / 200e3),
    "agents_80": (IntakeCase("agents", 1, 200, 200, count=12, turns=80), 0.0),
    "queued_long": (IntakeCase("queued", 16, new=LONG), 0.0),
    "unfinished_long": (IntakeCase("unfinished", 16, new=LONG), 0.0),
}
"""Cases, each with the response delay of its stand-ins in seconds: the paced ones deliver 200,000 tokens per second."""
PROCESSES: Mapping[str, int] = {"paced_2x128": 2}
"""Number of processes of cases with several, which share the stand-ins; the others have one."""
_COMPARED = ("paced_1x256", "paced_2x128")


def run(rounds: int = 3, shrink: int = 1) -> dict[str, Any]:
    """Measure all cases in turn.

    Args:
        rounds: measurements per case; the one with the least CPU time per token counts, because other load can only add to it.
        shrink: divides the numbers of trajectories, for a trial.

    Returns:
        "date", "machine", "load"; for each case in `CASES` the result of `benchmarks.intake_case`, the mean if there are several
        processes; for "paced_2x128" also "to_one", the CPU time per trajectory over that of "paced_1x256", in which one process receives
        as much. The two are measured in alternation.

    Raises:
        InvariantBroken: a case failed.
    """
    cases = {name: (case if shrink == 1 else _shrunk(case, shrink), delay_s) for name, (case, delay_s) in CASES.items()}
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for group in [*((name,) for name in cases if name not in _COMPARED), _COMPARED]:
        for _ in range(1 if cases[group[0]][0].kind in ("queued", "unfinished") else rounds):
            for name in group:
                measured[name].append(measure(*cases[name], PROCESSES.get(name, 1)))
    found = {
        name: min(results, key=lambda one: one.get("cpu_ms_per_trajectory", one.get("turn_ms_last", 0.0)))
        for name, results in measured.items()
    }
    one, two = (found[name]["cpu_ms_per_trajectory"] for name in _COMPARED)
    found["paced_2x128"]["to_one"] = round(two / one, 3)
    return {**here(), **found}


def _shrunk(case: IntakeCase, by: int) -> IntakeCase:
    return replace(case, count=max(case.count // by, 2), in_flight=max(case.in_flight // by, 8))


def measure(case: IntakeCase, delay_s: float, processes: int = 1) -> dict[str, Any]:
    """Measure one case in a new process, or in several at a time; then return the means."""
    with ExitStack() as started:
        ports = [started.enter_context(stand_in(delay_s)) for _ in range(_ENGINES)]
        command = [sys.executable, "-m", "benchmarks.intake_case", json.dumps({"case": asdict(case), "ports": ports})]
        running = [started.enter_context(_piped(command)) for _ in range(processes)]
        said = [process.communicate(timeout=_TIMEOUT_S) for process in running]
    for process, (_, errors) in zip(running, said, strict=True):
        if process.returncode:
            raise InvariantBroken(f"bench intake: {case.kind}: {errors[-2000:]}")
    results: list[dict[str, Any]] = [json.loads(output) for output, _ in said]
    return results[0] if processes == 1 else {name: round(fmean(result[name] for result in results), 3) for name in results[0]}


@contextmanager
def _piped(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def stand_in(delay_s: float = 0.0) -> Iterator[int]:
    """Start a stand-in; yield its port."""
    command = [sys.executable, "-m", "benchmarks.intake_server", str(delay_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def table(results: dict[str, Any]) -> str:
    """Format the results of `run`."""
    lines = [f"{'':16}{'tokens per CPU s':>18}{'per s':>12}{'CPU ms each':>13}{'lag ms p50':>12}{'p99':>8}{'max':>8}{'stretch p99':>13}"]
    for name, (case, _) in CASES.items():
        r = results[name]
        if case.kind == "rate" and case.watched:
            lag = f"{r['lag_ms_p50']:>12.1f}{r['lag_ms_p99']:>8.1f}{r['lag_ms_max']:>8.1f}{r['stretch_ms_p99']:>13.1f}"
            lines.append(f"{name:16}{r['tokens_per_cpu_s']:>18,.0f}{r['tokens_per_s']:>12,.0f}{r['cpu_ms_per_trajectory']:>13.2f}{lag}")
    lines.append(f"two processes: {results['paced_2x128']['to_one']:.2f} times the CPU time of one that takes in as much")
    turns = results["agents_80"]
    lines.append(
        f"a turn of an agent: {turns['turn_ms_first']:.2f} ms of CPU in the first ten, {turns['turn_ms_last']:.2f} in the last ten of 80 "
        f"({turns['last_to_first']:.2f}), besides its request ({turns['request_ms_first']:.2f} and {turns['request_ms_last']:.2f} ms)"
    )
    lines.append(
        f"a trajectory of {LONG:,} tokens takes {results['queued_long']['MB_each']:.1f} MB in the queue, "
        f"{results['unfinished_long']['MB_each']:.1f} MB while its conversation goes on"
    )
    return "\n".join(lines)
