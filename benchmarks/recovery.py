"""Downtime of a run after a trainer rank is killed, with the trainer restarted in place or everything restarted; and after the controller
is killed, which is restarted with the trainer while the engine waits.

A demo run with a real engine, in which one process is killed repeatedly, always the same number of steps after a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from asyncmoe.errors import InvariantBroken, WaitTimeout
from asyncmoe.telemetry import processes
from benchmarks.provenance import here

EVERY, LOST = 4, 2
"""Steps between checkpoints, and steps since the newest one when a rank is killed."""
WARM = 4
LIMIT_S = 300.0
_CHECKOUT = Path(__file__).parents[1]
_SHAPE = (
    f"warmup.steps={WARM}",
    "warmup.batch=16",
    "run.steps=100000",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    f"trainer.checkpoint_every={EVERY}",
)


@dataclass(frozen=True)
class Recovery:
    """Seconds from the kill until the trainer has loaded its checkpoint and contacted the controller (`met`), and until it has trained the
    interrupted step (`trained`)."""

    met: float
    trained: float


@dataclass(frozen=True)
class Successor:
    """Seconds from the kill of the controller until its successor has counted running episodes (`generates`), and until the trainer has
    trained the second step after it, which no earlier controller can have leased (`trained`)."""

    generates: float
    trained: float


def run(rounds: int = 3) -> dict[str, Any]:
    """Kill a rank `rounds` times in each way, and the controller, in turn.

    In place: only the trainer restarts. Everything: a rank and the run's supervisor are killed, and the same command is started when all
    processes have ended. A run that ends by itself after the loss of a rank takes longer, because it waits for all processes' error
    reports.

    Returns:
        {"date", "machine", "load", "steps_replayed", "in_place", "everything", "controller"}; for a way:
        "seconds" (median, kill to the interrupted step's training), "met" (median, kill to the trainer's first request) and
        "each". controller: "seconds" (median, kill to the second step after it), "generates" (median; see `Successor`),
        "each" of these, and "cpu": median CPU seconds that the next controller had used by then.

    Raises:
        InvariantBroken: the run ended.
        WaitTimeout: a step took longer than `LIMIT_S`.
    """
    measured_at = here()
    found: dict[str, list[Recovery]] = {"in_place": [], "everything": []}
    lost: list[tuple[Successor, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        rig = _Rig(Path(folder))
        try:
            for _ in range(rounds):
                lost.append(rig.succession())
                found["in_place"].append(rig.recovery(rig.kill_rank))
                found["everything"].append(rig.recovery(rig.start_over))
        finally:
            rig.end()
    ways = {way: _figures(recoveries) for way, recoveries in found.items()}
    return {**measured_at, "steps_replayed": LOST, **ways, "controller": _succession(lost)}


def _succession(found: list[tuple[Successor, float]]) -> dict[str, Any]:
    return {
        "seconds": round(median(one.trained for one, _ in found), 2),
        "generates": round(median(one.generates for one, _ in found), 2),
        "cpu": round(median(cpu for _, cpu in found), 2),
        "each": [round(one.generates, 2) for one, _ in found],
    }


def _figures(found: list[Recovery]) -> dict[str, Any]:
    return {
        "seconds": round(median(one.trained for one in found), 2),
        "met": round(median(one.met for one in found), 2),
        "each": [round(one.trained, 2) for one in found],
    }


class _Rig:
    """A run in a folder, as `asyncmoe run` starts it."""

    def __init__(self, folder: Path) -> None:
        self._dir, self._output = folder / "run", folder / "output"
        self._command = [
            "run",
            str(_CHECKOUT / "examples" / "demo.yaml"),
            f"run.dir={self._dir}",
            f"model.path={self._dir / 'model'}",
            *_SHAPE,
        ]
        self._process = self._start()

    def recovery(self, lose: Callable[[], None]) -> Recovery:
        """Kill the trainer at the next step that is `LOST` after a checkpoint, and measure the recovery."""
        before = len(self._records())
        self._wait(lambda: any(one.get("step", 0) > WARM and one["step"] % EVERY == LOST for one in self._records()[before:][-1:]))
        last, begin = self._records()[-1]["step"], time.time()
        before = len(self._records())
        lose()
        self._wait(lambda: any(one.get("step", 0) == last + 1 for one in self._records()[before:]))
        after = self._records()[before:]
        met = next(one["time"] for one in after if "resumed_at" in one)
        trained = next(one["time"] for one in after if one.get("step") == last + 1 and one["time"] > met)
        return Recovery(met - begin, trained - begin)

    def succession(self) -> tuple[Successor, float]:
        """Kill the controller after a step, and measure the recovery; also return its successor's CPU seconds until it generates."""
        before = len(self._records())
        self._wait(lambda: any(one.get("step", 0) > WARM for one in self._records()[before:]))
        last, begin = self._records()[-1]["step"], time.time()
        lost = self._pid("controller")
        os.kill(lost, signal.SIGKILL)
        self._wait(lambda: any(one["time"] > begin and one["running"] for one in self._counts()[-10:]))
        counted = next(one["time"] for one in self._counts() if one["time"] > begin and one["running"])
        used = psutil.Process(self._pid("controller")).cpu_times()
        self._wait(lambda: any(one.get("step", 0) == last + 2 for one in self._records()))
        trained = next(one["time"] for one in self._records() if one.get("step") == last + 2)
        return Successor(counted - begin, trained - begin), used.user + used.system

    def kill_rank(self) -> None:
        """Kill the last rank; the run restarts the trainer."""
        ranks = [one for one in processes.read(self._dir) if one.role.startswith("trainer.") and processes.runs(one)]
        os.kill(ranks[-1].pid, signal.SIGKILL)

    def start_over(self) -> None:
        """Kill a rank and the supervisor, and start the same command when all processes have ended."""
        every = psutil.Process(self._process.pid).children(recursive=True)
        self.kill_rank()
        self._process.kill()
        self._process.wait()
        _, left = psutil.wait_procs(every, timeout=60.0)
        if left:
            raise WaitTimeout("the end of a killed run", f"{len(left)} processes are left", 60.0)
        self._process = self._start()

    def end(self) -> None:
        """End the run, without a last checkpoint."""
        for number in (signal.SIGINT, signal.SIGINT):
            if self._process.poll() is None:
                self._process.send_signal(number)
                time.sleep(0.5)
        self._process.wait(90.0)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as output:
            return subprocess.Popen([sys.executable, "-m", "asyncmoe", *self._command], stdout=output, stderr=output)

    def _pid(self, role: str) -> int:
        return next(one.pid for one in processes.read(self._dir) if one.role == role)

    def _records(self) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl")

    def _counts(self) -> list[dict[str, Any]]:
        return self._lines("rollout.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self._dir / name
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def _wait(self, condition: Callable[[], bool]) -> None:
        begin = time.monotonic()
        while not condition():
            if self._process.poll() is not None:
                raise InvariantBroken(f"bench recovery: the run has ended: {self._output.read_text()[-2000:]}")
            if time.monotonic() - begin > LIMIT_S:
                raise WaitTimeout("the run of bench recovery", f"no step; its output: {self._output.read_text()[-2000:]}", LIMIT_S)
            time.sleep(0.02)


def table(found: dict[str, Any]) -> str:
    """Format one line per way."""
    lines = [f"{'':<12}{'trainer met':>12}{'step trained':>14}   s after the kill"]
    lines += [f"{way:<12}{found[way]['met']:>12.1f}{found[way]['seconds']:>14.1f}" for way in ("in_place", "everything")]
    lost = found["controller"]
    said = f"generates after {lost['generates']:.1f} s ({lost['cpu']:.1f} s of CPU), and the trainer has trained two steps after"
    return "\n".join([*lines, f"controller killed: the next one {said} {lost['seconds']:.1f} s"])
