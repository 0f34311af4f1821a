"""How a step ended, from what srun printed and its tasks wrote. Pure."""

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
"""How an error begins that says itself which part met it, on which node (`asyncmoe.process.named`)."""


@dataclass(frozen=True)
class EndedStep:
    """A step that ended badly; an `asyncmoe.launch.watch.Ended`.

    Attributes:
        name: of the step.
        node: where it began; a list as SLURM writes it where several nodes ended alike.
        returncode: of the process, negative when a signal ended it.
        reason: what the process said of it, if it said anything.
        log: where more is to be found.
    """

    name: str
    node: str
    returncode: int
    reason: str | None
    log: Path

    def why(self) -> str:
        """The reason, or else where to look; part and node in either case."""
        if self.reason is not None:
            named = _NAMED.match(self.reason) is not None
            return f"{self.reason if named else f'{self.name} on {self.node}: {self.reason}'} (log: {self.log})"
        if self.returncode < 0:
            how = f"was ended by {_signal_name(-self.returncode)}, as when memory runs out"
            return f"{self.name} on {self.node}: {how}; look at `sacct -j` for the job's memory, the node's dmesg, and {self.log}"
        return f"{self.name} on {self.node}: ended with status {self.returncode}; its log is {self.log}"


def first_end(output: str, nodes: Sequence[str], status: int) -> tuple[str, int]:
    """The node and status, negative for a signal, of the first task of a step that ended badly, from srun's own messages.

    srun ends with the highest status of all tasks, so one that was ended because of another would hide it.

    Args:
        output: what srun wrote.
        nodes: of the step, named when srun says nothing.
        status: of srun, taken when it says nothing.
    """
    for line in output.splitlines():
        if _OURS.match(line):
            break
        match = _ENDED.match(line)
        if match is not None:
            return match["nodes"], _signed(_status(match["how"], status))
    return ",".join(nodes), _signed(status)


def reason(logs: Mapping[str, str], output: str) -> str | None:
    """What a step said of its end: that a signal ended a rank, which others only suffer from, or the first line of an error of ours, or
    srun's last complaint.

    Args:
        logs: what each node's task wrote, the one first where the end began.
        output: what srun wrote, and tasks that could not open their log.
    """
    lines = [line for text in (*logs.values(), output) for line in text.splitlines()]
    errors = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    if errors:
        return next((error for error in errors if error.startswith(KILLED)), errors[0])
    complaints = [line for line in output.splitlines() if _complaint(line)]
    return complaints[-1] if complaints else None


def decide(exit_code: int, lost: int, requeues: int) -> Action:
    """What becomes of the job.

    Args:
        exit_code: of the first cause.
        lost: how often it went back into the queue because of a lost process.
        requeues: how often it may.
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
    """A shell's 128 + n is the end by signal n."""
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
"""Signals by what the C library calls them, which srun prints: "Killed", "Segmentation fault"."""
