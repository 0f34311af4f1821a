"""How a step ended, and which end was the cause of the others. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncmoe.process import ERROR_PREFIX

Action = Literal["requeue", "fail"]
_ENDED = re.compile(r"srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>[^\r\n]+)")
_OURS = re.compile(r"srun: (launch/slurm: )?.*(Terminating|Force Terminated|forcing job termination|Job step aborted)")
_WAITED = re.compile(r"^waited \d")


@dataclass(frozen=True)
class Ended:
    """A step that ended badly.

    Attributes:
        name: of the step.
        node: where it began; a list as SLURM writes it where several nodes ended alike.
        status: of the process, above 128 when a signal ended it.
        reason: what the process said of it, if it said anything.
        log: where more is to be found.
    """

    name: str
    node: str
    status: int
    reason: str | None
    log: str

    @property
    def mistake(self) -> bool:
        """The user's, who alone can mend it."""
        return self.status == 2

    def __str__(self) -> str:
        where = f"{self.name} on {self.node}: "
        if self.reason is not None:
            return f"{where}{self.reason} (log: {self.log})"
        if self.status > 128:
            how = f"was ended by {_signal_name(self.status - 128)}, which may be the node's memory that ran out"
            return f"{where}{how}; look at `sacct -j` for the job's memory, the node's dmesg, and {self.log}"
        return f"{where}ended with status {self.status}; its log is {self.log}"


def first_end(output: str, nodes: Sequence[str], status: int) -> tuple[str, int]:
    """The node and status of the first task of a step that ended badly, from srun's own messages.

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
            return match["nodes"], _status(match["how"], status)
    return ",".join(nodes), status if status >= 0 else 128 - status


def reason(logs: Mapping[str, str], output: str) -> str | None:
    """What a step said of its end: the first line of an error of ours on any node, or srun's last complaint.

    Args:
        logs: what each node's task wrote.
        output: what srun wrote, and tasks that could not open their log.
    """
    for text in (*logs.values(), output):
        for line in text.splitlines():
            if line.startswith(ERROR_PREFIX):
                return line.removeprefix(ERROR_PREFIX)
    complaints = [line for line in output.splitlines() if _complaint(line)]
    return complaints[-1] if complaints else None


def first_cause(ended: Sequence[Ended]) -> Ended:
    """Of several ends close to each other the one that the others follow from: a user's mistake, then a process that was killed, then one
    with a reason of its own, then one that waited for another."""
    return min(ended, key=_rank)


def decide(cause: Ended, lost: int, requeues: int) -> Action:
    """What becomes of the job.

    Args:
        lost: how often it went back into the queue because of a lost process.
        requeues: how often it may.
    """
    return "fail" if cause.mistake or lost >= requeues else "requeue"


def _rank(ended: Ended) -> int:
    if ended.mistake:
        return 0
    if ended.status > 128:
        return 1
    if ended.reason is None:
        return 3
    return 4 if _WAITED.match(ended.reason) else 2


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
