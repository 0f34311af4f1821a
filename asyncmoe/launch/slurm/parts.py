"""Running steps: start them, ask them to stop, end them, and explain their failures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch import watch
from asyncmoe.launch.slurm import control, verdict
from asyncmoe.launch.slurm.steps import JobStep
from asyncmoe.process import Child

log = logging.getLogger(__name__)
STOP = "URG"
"""Signal that asks a step to stop.

SLURM sends a signal to every process of a step, and srun turns its own SIGTERM into SIGKILL for all of them (both seen with 22.05). An
engine's server must not receive the stop before the process that leads it. Processes ignore SIGURG by default, and only `task`,
in the process that must stop first, handles it.
"""
_SETTLE_S = 2.0
"""Seconds to wait after the first failure for the reasons of other parts."""
_POLITE_S = 15.0
_FORCED_S = 45.0
"""Seconds for srun to end; it waits KillWait + 2 s (32 s by default) for its tasks before it gives up."""


class Part:
    """A step and the `srun` that runs it."""

    def __init__(self, step: JobStep) -> None:
        self.step = step
        self._sizes = {path: _size(path) for path in (step.output, *step.logs.values())}
        self._child = Child(step.name, step.command, step.output)

    @property
    def status(self) -> int | None:
        """Exit status of srun, or None while it runs."""
        return self._child.returncode

    @property
    def failed(self) -> bool:
        return self.status not in (None, 0)

    def ended(self) -> verdict.EndedStep:
        """Return how the step ended. Requires that it has failed."""
        assert self.status is not None
        output = self._since_start(self.step.output)
        nodes, status = verdict.first_end(output, self.step.nodes, self.status)
        first = sorted(self.step.logs, key=lambda node: node != nodes)
        written = {node: self._since_start(self.step.logs[node]) for node in first}
        files = [self.step.logs.get(nodes), *self.step.logs.values(), self.step.output]
        file = next((file for file in files if file is not None and file.exists()), self.step.output)
        return verdict.EndedStep(self.step.name, nodes, status, verdict.reason(written, output), file)

    def end(self) -> None:
        """End srun, which ends its tasks."""
        self._child.end(_FORCED_S)

    def _since_start(self, path: Path) -> str:
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(self._sizes[path])
            return file.read().decode(errors="replace")


def start(steps: Sequence[JobStep], into: list[Part]) -> None:
    """Start steps one after the other, and append each to `into` so that the started ones are known if a later one fails."""
    for step in steps:
        into.append(Part(step))


def ask_to_stop(parts: Sequence[Part]) -> bool:
    """Ask steps to stop by themselves; return false if SLURM does not know all of them yet."""
    known = _numbers(parts)
    for number in known.values():
        control.signal_step(number, STOP)
    return len(known) == len(parts)


def first_cause(parts: Sequence[Part]) -> AsyncmoeError:
    """Return the root cause. Requires that at least one part has failed."""
    time.sleep(_SETTLE_S)
    return watch.failure([part.ended() for part in parts if part.failed])


def end_all(parts: Sequence[Part]) -> None:
    """End the steps that still run, with SIGTERM first; other steps of the job are left alone."""
    running = [part for part in parts if part.status is None]
    try:
        for number in _numbers(running).values():
            control.signal_step(number, "TERM")
    except AsyncmoeError as error:
        log.warning("steps are ended by their srun alone: %s", error)
    wait_until(lambda: all(part.status is not None for part in running), _POLITE_S)
    for part in running:
        part.end()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until `condition` holds; return false after `seconds`."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _numbers(parts: Sequence[Part]) -> dict[str, str]:
    """Return SLURM's step numbers by part name, for the parts that SLURM knows."""
    known = {job: control.steps(job) for job in {part.step.job for part in parts}}
    return {part.step.name: known[part.step.job][part.step.name] for part in parts if part.step.name in known[part.step.job]}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
