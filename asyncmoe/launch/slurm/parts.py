"""Running steps: start them, ask them to stop, end them, and explain their failures."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.slurm import control
from asyncmoe.process import Child, signalled, wait_until

log = logging.getLogger(__name__)
STOP = "URG"
"""Signal that asks a step to stop.

SLURM sends a signal to every process of a step, and srun turns its own SIGTERM into SIGKILL for all of them (both seen with 22.05). An
engine's server must not receive the stop before the process that leads it. Processes ignore SIGURG by default, and only `task`,
in the process that must stop first, handles it.
"""
SETTLE_S = 2.0
"""Seconds to wait after the first failure for the reasons of other parts."""
_ASK_AGAIN_S = 2.0
_POLITE_S = 15.0
_FORCED_S = 45.0
"""Seconds for srun to end; it waits KillWait + 2 s (32 s by default) for its tasks before it gives up."""
_ENDED = re.compile(r"srun: error: \S+: tasks? [\d,-]+: ")
"""srun's report of a task's status, not a complaint of SLURM's."""


class SlurmPart(Child):
    """A step and the `srun` that runs it, as a `Process` of the run. srun copies its task's output to the log.

    Args:
        step: name of the step in `squeue --steps`: "controller", "trainer", "engine.0".
        command: the whole `srun` command.
        logs: folder of its log, which is named after step and node.
    """

    def __init__(self, step: str, node: str, command: Sequence[str], logs: Path, environment: Mapping[str, str]) -> None:
        self.step = step
        super().__init__(f"{step} on {node}", command, logs / f"{step}.{node}.log", environment)

    @property
    def returncode(self) -> int | None:
        """Status of its task, which srun passes on, negative if a signal ended it; None while srun runs."""
        status = super().returncode
        return status if status is None or status <= 128 else 128 - status

    @property
    def reason(self) -> str | None:
        """The reason that the process gave for its end, else SLURM's last complaint, else None."""
        if (said := super().reason) is not None:
            return said
        complaint = next(filter(_complains, reversed(self.output().splitlines())), None)
        return complaint and f"{self.name}: {complaint}"

    def why(self) -> str:
        """The reason; without one the status or the signal, and the log."""
        status = self.returncode or 0
        if self.reason is not None or status >= 0:
            return super().why()
        return f"{self.name}: was ended by {signalled(status)}; look at `sacct -j` for the job's memory, the node's dmesg, and {self.log}"


def ask_to_stop(job: str, step: str) -> bool:
    """Ask a step to stop by itself; return false, after a pause, if SLURM does not know it yet or does not answer."""
    try:
        if (number := control.steps(job).get(step)) is not None:
            control.signal_step(number, STOP)
            return True
    except AsyncmoeError as error:
        print(f"retrying the stop request in {_ASK_AGAIN_S:.0f} s: {error}", flush=True)
    time.sleep(_ASK_AGAIN_S)
    return False


def end_all(job: str, parts: Sequence[SlurmPart]) -> None:
    """End the steps that still run, with SIGHUP first; other steps of the job are left alone."""
    running = [part for part in parts if part.returncode is None]
    try:
        known = control.steps(job) if running else {}
        for part in running:
            if part.step in known:
                control.signal_step(known[part.step], "HUP")
    except AsyncmoeError as error:
        log.warning("cannot signal the steps, which only their srun now ends: %s", error)
    wait_until(lambda: all(part.returncode is not None for part in running), _POLITE_S)
    for part in running:
        part.end(_FORCED_S)


def _complains(line: str) -> bool:
    if line.startswith(("srun: error:", "srun: fatal:")):
        return _ENDED.match(line) is None
    return line.startswith(("slurmstepd", "pyxis:", "error: pyxis:")) and "error" in line and "CANCELLED" not in line
