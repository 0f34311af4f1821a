"""Trainer and engine on the same devices in turn: memory by state, growth over many switches, seconds of a switch, and of a step next to
`placement: split`.

Whole runs of the demo's configuration with a larger mixture: two trainer ranks (tensor and expert parallel), an engine of two ranks.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from asyncmoe.config import of_run
from asyncmoe.models import hf_config_of
from asyncmoe.plan import switch
from asyncmoe.telemetry.run import RunRecords, load
from asyncmoe.telemetry.schema import What
from benchmarks.provenance import here

TOKENS = 49_152
MODEL = "{layers: 4, hidden: 256, experts: 16, experts_per_token: 2, expert_hidden: 256, heads: 8, kv_heads: 4, head_dim: 32}"
CACHED = 2 * 4 * 4 * 32 * 4
"""Bytes of each of the engine's `TOKENS`: keys and values, layers, heads, width, float32."""
SHAPE = (
    f"model.make={MODEL}",
    f"engines.max_total_tokens={TOKENS}",
    "engines.tp=2",
    "trainer.tp=2",
    "trainer.checkpoint_every=0",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "warmup.steps=2",
    "warmup.batch=16",
    "queue.staleness.max_staleness=0",
)
WAYS: Mapping[str, tuple[str, ...]] = {"colocated": ("placement=colocated",), "split": ("run.mode=sync", "placement=split")}
FIRST = 5
"""RL steps that are not counted."""
STATES: Mapping[str, What] = {"generating": "wait", "training": "train"}
SIDES = {"trainer": "asyncmoe.trainer", "engine": "sglang::scheduler"}
_CHECKOUT = Path(__file__).parents[1]
Sample = tuple[float, float, dict[str, int]]
"""When it began and ended, in Unix seconds, and each side's bytes."""


def run(switches: int = 200, pairs: int = 6) -> dict[str, Any]:
    """Watch the memory of a run of so many steps in each way, then compare pairs of shorter runs. Returns as `summed`."""
    measured_at = here()
    with tempfile.TemporaryDirectory() as folder:
        memory = {way: memory_of(Path(folder, way), switches, way) for way in WAYS}
        return {**measured_at, **summed(memory, [pair(Path(folder), number) for number in range(pairs)])}


def memory_of(directory: Path, steps: int, way: str) -> dict[str, Any]:
    """Watch the memory of a run; return its `figures`."""
    with running(directory, steps, way) as process:
        samples = list(watched(process))
    return figures(samples, directory)


def pair(folder: Path, number: int, steps: int = 25) -> dict[str, Any]:
    """Make a run in each way; the first alternates. Return "seconds" and "cpu" (of all processes) of a counted step by way, "switches" (the
    seconds of each by part) and "least" (the same, by `asyncmoe plan`)."""
    ways = sorted(WAYS, reverse=number % 2 == 1)
    found = {way: timed(folder / f"{way}-{number}", steps, way) for way in ways}
    config, records = of_run(folder / f"colocated-{number}"), load(folder / f"colocated-{number}")
    return {
        **{kind: {way: one[kind] for way, one in found.items()} for kind in ("seconds", "cpu")},
        "switches": [one.switch_seconds for one in records.rl[FIRST:]],
        "least": dict(switch.bound(config, hf_config_of(config))),
    }


def summed(memory: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {"memory" (`figures` by way), "switch" (seconds by part and of all, "least" and the "share" of the whole that this is), "step"
    ("seconds" and "cpu": those of each pair, and the "ratio" of colocated to split)}. Medians have 90 % intervals."""
    switches = [one for each in pairs for one in each["switches"]]
    whole, least = _with_interval([sum(one.values()) for one in switches]), pairs[0]["least"]
    by_part = {part: _with_interval([one[part] for one in switches]) for part in switches[0]}
    steps = {
        kind: {
            "each": [one[kind] for one in pairs],
            "ratio": _with_interval([one[kind]["colocated"] / one[kind]["split"] for one in pairs]),
        }
        for kind in ("seconds", "cpu")
    }
    shares = {"least": least, "share": sum(least.values()) / whole["median"]}
    return {"memory": memory, "switch": {"seconds": by_part, "whole": whole, **shares}, "step": steps}


@contextmanager
def running(directory: Path, steps: int, way: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run; at the end of the block, wait until it has ended. Raises CalledProcessError: it failed."""
    overrides = (f"run.dir={directory}", f"model.path={directory / 'model'}", f"run.steps={steps}", *SHAPE, *WAYS[way], *more)
    command = [sys.executable, "-m", "asyncmoe", "run", "examples/demo.yaml", *overrides]
    with subprocess.Popen(command, cwd=_CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
            if process.wait(3600):
                raise subprocess.CalledProcessError(process.returncode, command)
        finally:
            process.terminate()


def watched(process: subprocess.Popen[bytes], every_s: float = 0.03) -> Iterator[Sample]:
    """Yield both sides' memory again and again until the run has ended."""
    sides: dict[str, list[int]] = {}
    looked = 0.0
    while process.poll() is None:
        if time.time() - looked > 2:
            lines = {one.pid: _line(one) for one in psutil.Process(process.pid).children(recursive=True)}
            sides = {
                side: [pid for pid, line in lines.items() if words in line and "torchrun" not in line] for side, words in SIDES.items()
            }
            looked = time.time()
        begin, nbytes = time.time(), {side: sum(map(owned, pids)) for side, pids in sides.items()}
        yield begin, time.time(), nbytes
        time.sleep(every_s)


def _line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def owned(pid: int) -> int:
    """Return a process's bytes of anonymous and shared memory, a page that n processes map counted as 1/n; pages of files are left out."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
    return 0


def figures(samples: Sequence[Sample], directory: Path) -> dict[str, Any]:
    """Return "engine_MB" (weights and KV cache), "MB" (median of each side by state), "freed" (share of the engine's weights and cache that
    it gives back while the trainer works), "peak_MB" (the most of both at once, in states and switches), and "growth" of each side by state
    over the last four fifths of the switches: bytes a switch with a 95 % interval, and 200 switches' share of what it holds there."""
    records = load(directory)
    by_state = {state: _inside(samples, records, what) for state, what in STATES.items()}
    held = TOKENS * CACHED + (of_run(directory).model.path / "model.safetensors").stat().st_size
    middle = {state: {side: median(one[side] for one in chain(*each.values())) for side in SIDES} for state, each in by_state.items()}
    every = chain.from_iterable(chain(*each.values()) for each in (*by_state.values(), _inside(samples, records, "switch")))
    return {
        "switches": len(records.rl),
        "engine_MB": held / 1e6,
        "MB": {state: {side: nbytes / 1e6 for side, nbytes in each.items()} for state, each in middle.items()},
        "freed": (middle["generating"]["engine"] - middle["training"]["engine"]) / held,
        "peak_MB": max(sum(one.values()) for one in every) / 1e6,
        "growth": {side: {state: _growth(each, side) for state, each in by_state.items()} for side in SIDES},
    }


def _inside(samples: Sequence[Sample], records: RunRecords, what: What) -> dict[int, list[dict[str, int]]]:
    """Return the samples during which the trainer did nothing but `what`, by number of the interval, after the first steps."""
    starts, found = [begin for begin, _, _ in samples], dict[int, list[dict[str, int]]]()
    for number, (begin, end) in enumerate(records.intervals(what, "trainer.0")):
        inside = [nbytes for _, ends, nbytes in samples[bisect(starts, begin) : bisect(starts, end)] if ends <= end]
        if inside and begin > records.rl[FIRST].begin:
            found[number] = inside
    return found


def _growth(by_number: Mapping[int, Sequence[Mapping[str, int]]], side: str) -> dict[str, Any]:
    numbers = [*by_number][len(by_number) // 5 :]
    nbytes = [median(one[side] for one in by_number[number]) for number in numbers]
    (slope, middle), covariance = np.polyfit(np.array(numbers) - np.mean(numbers), nbytes, 1, cov=True)
    error = 1.96 * covariance[0, 0] ** 0.5
    return {"bytes_a_switch": slope, "interval_95": [slope - error, slope + error], "share_after_200": 200 * slope / middle}


def timed(directory: Path, steps: int, way: str) -> dict[str, float]:
    """Return the seconds and the CPU seconds of all processes for each step after the first `FIRST`."""
    with running(directory, steps, way) as process:
        ends = [_at(process, directory, step) for step in (2 + FIRST, 2 + steps - 1)]
    return {kind: (ends[1][kind] - ends[0][kind]) / (steps - 1 - FIRST) for kind in ("seconds", "cpu")}


def _at(process: subprocess.Popen[bytes], directory: Path, step: int) -> dict[str, float]:
    file = directory / "metrics.jsonl"
    while not (file.exists() and f'"step":{step},' in file.read_text()):
        if process.poll() is not None:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        time.sleep(0.02)
    spent = 0.0
    for one in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            spent += sum(one.cpu_times()[:2])
    return {"seconds": time.perf_counter(), "cpu": spent}


def _with_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the median with its 90 % interval, by resampling."""
    drawn = np.median(np.random.default_rng(0).choice(values, (10_000, len(values))), axis=1)
    return {"median": median(values), "interval_90": np.quantile(drawn, (0.05, 0.95)).tolist(), "count": len(values)}
