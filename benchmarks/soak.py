"""A long run of very small steps: does any process of it, or any folder, grow?

The demo's model and processes with steps of four groups of four, so that thousands of steps fit into two hours. What a process keeps for
each step, group or request shows as a slope over the steps, after the first minutes, in which pools fill.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from asyncmoe.telemetry import processes
from asyncmoe.telemetry.records import Tail
from asyncmoe.telemetry.schema import METRICS
from benchmarks import soak_slopes
from benchmarks.held import below, held, shared_files, size
from benchmarks.live_run import LiveRun
from benchmarks.provenance import here

EVERY_S = 10.0
SAMPLES = "samples.jsonl"
_NAMES = {
    "asyncmoe.launch.torchrun": "torchrun",
    "asyncmoe.platform.sglang": "sglang main",
    "sglang::scheduler": "sglang scheduler",
    "sglang::detokenizer": "sglang detokenizer",
}
"""Of processes that record no role, by a part of their command line."""
_SHAPE = (
    "warmup.steps=100",
    "warmup.batch=64",
    "run.steps=10000000",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "trainer.checkpoint_every=200",
    "trainer.optimizer.lr=1.0e-5",
)
_PATIENT = (
    "rollout.request_timeout_s=1800",
    "engines.start_timeout_s=1800",
    "engines.hang_timeout_s=1200",
    "queue.lease_timeout_s=1800",
    "trainer.timeout_s=1800",
    "sync.timeout_s=1200",
)
"""On a machine with other work a small step may take long, and no process hangs."""


def run(seconds: float = 7200.0, folder: Path | None = None) -> dict[str, Any]:
    """Run for so many seconds and measure.

    Args:
        folder: new folder for the run, and for its samples, in samples.jsonl; default: a temporary one.

    Returns:
        {"date", "machine", "load", "seconds", "every_s", "bound_mb_per_1000_steps", "steps_per_s", "left": what the ended run left in
        /dev/shm and among temporary files}, and what `soak_slopes.figures` returns.

    Raises:
        InvariantBroken: the run ended before its time, or with an error.
    """
    measured_at = here()
    with tempfile.TemporaryDirectory() as made:
        soak = _Soak(Path(made) if folder is None else folder.absolute())
        try:
            soak.watch(seconds)
        finally:
            soak.end()
        found = soak_slopes.figures(soak.samples(), min(soak_slopes.SETTLE_S, seconds / 4))
        return {
            **measured_at,
            "seconds": round(seconds),
            "every_s": EVERY_S,
            "bound_mb_per_1000_steps": soak_slopes.BOUND_MB,
            "steps_per_s": round(found["steps"] / (found["to_s"] - found["from_s"]), 2),
            "left": soak.left(),
            **found,
        }


class _Soak:
    """A run in a folder, with its temporary files there too, and the samples of it."""

    def __init__(self, folder: Path) -> None:
        self._samples, self._temporary = folder / SAMPLES, folder / "tmp"
        self._temporary.mkdir(parents=True)
        self._live = LiveRun("soak", folder, (*_SHAPE, *_PATIENT), {"TMPDIR": str(self._temporary)})
        self._steps, self._tail, self._shared = 0, Tail(self._live.dir / METRICS), set[str]()

    def watch(self, seconds: float) -> None:
        """Sample the run until it has run for so long."""
        begin = time.monotonic()
        with self._samples.open("w", buffering=1) as file:
            for i in range(1, int(seconds / EVERY_S) + 1):
                time.sleep(max(0.0, begin + i * EVERY_S - time.monotonic()))
                self._live.check()
                file.write(json.dumps(self._sample(time.monotonic() - begin)) + "\n")

    def samples(self) -> list[dict[str, Any]]:
        """All samples so far."""
        return [json.loads(line) for line in self._samples.read_text().splitlines()]

    def end(self) -> None:
        """Stop the run; see `LiveRun.end`."""
        self._live.end()

    def left(self) -> list[str]:
        """What the ended run has left of its shared memory and temporary files."""
        return [*sorted(path for path in self._shared if Path(path).exists()), *below(self._temporary)]

    def _sample(self, at: float) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            self._steps = max([self._steps, *(one["step"] for one in self._tail.poll() if "step" in one)])
        run_dir = self._live.dir
        roles = {one.pid: one.role for one in processes.read(run_dir)}
        found: dict[str, Any] = {}
        shared: set[str] = set()
        for child in self._live.processes():
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                name = roles.get(child.pid) or _name(child.cmdline())
                name = f"{name}.{child.pid}" if name in found else name
                found[name] = dataclasses.asdict(held(child.pid))
                shared |= shared_files(child.pid)
        self._shared |= shared
        folders = {"shared memory": sorted(shared), "temporary files": below(self._temporary)}
        folders |= {one.name: below(one) for one in run_dir.iterdir() if one.is_dir()} if run_dir.exists() else {}
        folders["records"] = [str(one) for one in run_dir.glob("*.jsonl")]
        sizes = {name: {"files": len(paths), "bytes": size(paths)} for name, paths in folders.items()}
        return {"s": round(at, 1), "steps": self._steps, "processes": found, "folders": sizes}


def _name(command: list[str]) -> str:
    """A short name of a process by its command line."""
    words = " ".join(command)
    found = next((name for part, name in _NAMES.items() if part in words), None)
    return found or " ".join(Path(word).name for word in command[:4])
