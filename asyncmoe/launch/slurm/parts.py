"""Running steps: start them, ask them to stop, end them, and explain their failures from srun's output and their tasks' logs."""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.slurm import control
from asyncmoe.launch.slurm.steps import JobStep
from asyncmoe.process import Child, root_cause, wait_until

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
_ENDED = re.compile(r"srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>[^\r\n]+)")
_OURS = re.compile(r"srun: (launch/slurm: )?.*(Terminating|Force Terminated|forcing job termination|Job step aborted)")
_NAMED = re.compile(r"[\w.-]+ on \S+: ")
"""Prefix of an error that already names its part and node (`asyncmoe.process.named`)."""


@dataclass(frozen=True)
class EndedStep:
    """A failed step, as an `asyncmoe.launch.failures.Ended`.

    Attributes:
        name: name of the step.
        node: node that failed first; SLURM's node list if several nodes failed alike.
        returncode: exit status of the process, negative if a signal ended it.
        reason: the reason that the process gave, if any.
        log: log file with details.
    """

    name: str
    node: str
    returncode: int
    reason: str | None
    log: Path

    def why(self) -> str:
        """Part and node, with the reason and log; without a reason, with the status and log."""
        if self.reason is not None:
            named = _NAMED.match(self.reason) is not None
            return f"{self.reason if named else f'{self.name} on {self.node}: {self.reason}'} (log: {self.log})"
        if self.returncode < 0:
            memory = ", as when memory runs out" if self.returncode == -signal.SIGKILL else ""
            how = f"was ended by {_signal_name(-self.returncode)}{memory}"
            return f"{self.name} on {self.node}: {how}; look at `sacct -j` for the job's memory, the node's dmesg, and {self.log}"
        return f"{self.name} on {self.node}: ended with status {self.returncode}; its log is {self.log}"


class Part(Child):
    """A step and the `srun` that runs it, as a `Process` of the run."""

    def __init__(self, step: JobStep) -> None:
        self.step = step
        self._sizes = {path: path.stat().st_size if path.exists() else 0 for path in (step.output, *step.logs.values())}
        self._first: tuple[str, int] | None = None
        super().__init__(step.name, step.command, step.output)
        self.log = step.logs[step.nodes[0]]

    @property
    def returncode(self) -> int | None:
        """Status of its first task that failed, negative if a signal ended it; None while srun runs."""
        if not (status := super().returncode):
            return status
        self._first = self._first or first_end(self._since_start(self.step.output), self.step.nodes, status)
        return self._first[1]

    @property
    def ended(self) -> EndedStep:
        """How the step ended. Requires that it has failed."""
        assert self.returncode is not None
        assert self._first is not None
        nodes, status = self._first
        first = sorted(self.step.logs, key=lambda node: node != nodes)
        written = {node: self._since_start(self.step.logs[node]) for node in first}
        file = next((self.step.logs[node] for node in first if self.step.logs[node].exists()), self.step.output)
        return EndedStep(self.step.name, nodes, status, reason(written, self._since_start(self.step.output)), file)

    @property
    def reason(self) -> str | None:
        """The reason that the process gave for its end; None if it gave none."""
        return self.ended.reason

    def why(self) -> str:
        """See `EndedStep.why`."""
        return self.ended.why()

    def _since_start(self, path: Path) -> str:
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(self._sizes[path])
            return file.read().decode(errors="replace")


def ask_to_stop(parts: Sequence[Part]) -> bool:
    """Ask steps to stop by themselves; return false, after a while, if SLURM does not know all of them yet or does not answer."""
    try:
        known = _numbers(parts)
        for number in known.values():
            control.signal_step(number, STOP)
    except AsyncmoeError as error:
        print(f"retrying the stop request in {_ASK_AGAIN_S:.0f} s: {error}", flush=True)
        known = {}
    if told := len(known) == len(parts):
        return told
    time.sleep(_ASK_AGAIN_S)
    return False


def end_all(parts: Sequence[Part]) -> None:
    """End the steps that still run, with SIGHUP first; other steps of the job are left alone."""
    running = [part for part in parts if part.returncode is None]
    try:
        for number in _numbers(running).values():
            control.signal_step(number, "HUP")
    except AsyncmoeError as error:
        log.warning("steps are ended by their srun alone: %s", error)
    wait_until(lambda: all(part.returncode is not None for part in running), _POLITE_S)
    for part in running:
        part.end(_FORCED_S)


def first_end(output: str, nodes: Sequence[str], status: int) -> tuple[str, int]:
    """Return node and status (negative for a signal) of a step's first failed task, from srun's own messages.

    srun exits with the highest status of all tasks, so a task that was killed because another failed would hide the cause.

    Args:
        output: srun's output.
        nodes: nodes of the step, returned if srun names none.
        status: exit status of srun, returned if srun reports none.
    """
    for line in output.splitlines():
        if _OURS.match(line):
            break
        match = _ENDED.match(line)
        if match is not None:
            return match["nodes"], _signed(_status(match["how"], status))
    return ",".join(nodes), _signed(status)


def reason(logs: Mapping[str, str], output: str) -> str | None:
    """Return a step's own reason for its end: a rank that a signal ended, because other ranks' errors follow from it, else the first
    error line of asyncmoe, else srun's last error.

    Args:
        logs: log of each node's task, the node that failed first at the front.
        output: output of srun, and of tasks that could not open their log.
    """
    if (error := root_cause(line for text in (*logs.values(), output) for line in text.splitlines())) is not None:
        return error
    complaints = [line for line in output.splitlines() if _complaint(line)]
    return complaints[-1] if complaints else None


def _numbers(parts: Sequence[Part]) -> dict[str, str]:
    """Return SLURM's step numbers by part name, for the parts that SLURM knows."""
    known = {job: control.steps(job) for job in {part.step.job for part in parts}}
    return {part.step.name: known[part.step.job][part.step.name] for part in parts if part.step.name in known[part.step.job]}


def _complaint(line: str) -> bool:
    if line.startswith(("srun: error:", "srun: fatal:")):
        return _ENDED.match(line) is None
    return line.startswith(("slurmstepd", "pyxis:", "error: pyxis:")) and "error" in line and "CANCELLED" not in line


def _status(how: str, otherwise: int) -> int:
    match = re.search(r"exit code (\d+)", how)
    if match is not None:
        return int(match[1])
    word = how.split()[0].rstrip(",")
    return 128 + _WORDS[word] if word in _WORDS else max(otherwise, 1)


def _signed(status: int) -> int:
    """Convert a shell's status 128 + n for signal n to -n."""
    return 128 - status if status > 128 else status


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _words() -> dict[str, int]:
    described = {number: signal.strsignal(number) for number in signal.valid_signals()}
    return {text.split()[0]: number for number, text in described.items() if text}


_WORDS = _words()
"""Signals by the first word of the C library's description, which srun prints: "Killed", "Segmentation fault"."""
