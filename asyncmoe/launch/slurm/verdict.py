"""How a step ended, from srun's output and its tasks' logs. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncmoe.errors import UserError
from asyncmoe.process import ERROR_PREFIX, KILLED

Action = Literal["requeue", "fail"]
_ENDED = re.compile(r"srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>[^\r\n]+)")
_OURS = re.compile(r"srun: (launch/slurm: )?.*(Terminating|Force Terminated|forcing job termination|Job step aborted)")
_NAMED = re.compile(r"[\w.-]+ on \S+: ")
"""Prefix of an error that already names its part and node (`asyncmoe.process.named`)."""


@dataclass(frozen=True)
class EndedStep:
    """A failed step, as an `asyncmoe.launch.watch.Ended`.

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
            how = f"was ended by {_signal_name(-self.returncode)}, as when memory runs out"
            return f"{self.name} on {self.node}: {how}; look at `sacct -j` for the job's memory, the node's dmesg, and {self.log}"
        return f"{self.name} on {self.node}: ended with status {self.returncode}; its log is {self.log}"


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
    lines = [line for text in (*logs.values(), output) for line in text.splitlines()]
    errors = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    if errors:
        return next((error for error in errors if error.startswith(KILLED)), errors[0])
    complaints = [line for line in output.splitlines() if _complaint(line)]
    return complaints[-1] if complaints else None


def decide(exit_code: int, lost: int, requeues: int) -> Action:
    """Decide whether a failed job is requeued.

    Args:
        exit_code: exit code of the root cause.
        lost: number of requeues so far because of a lost process.
        requeues: highest number of such requeues.
    """
    return "fail" if exit_code == UserError.exit_code or lost >= requeues else "requeue"


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
