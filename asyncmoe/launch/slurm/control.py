"""SLURM's own commands, each with a time-out."""

from __future__ import annotations

import re
import subprocess
import time

from asyncmoe.errors import AsyncmoeError, WaitTimeout

_ANSWER_S = 60.0
"""slurmctld of a large site can be busy for many seconds."""


def hostnames(nodelist: str) -> tuple[str, ...]:
    """The nodes of "n[1-3]", in SLURM's order."""
    return tuple(_run("scontrol", "show", "hostnames", nodelist).split())


def address(node: str) -> str:
    """What SLURM reaches a node at; its name need not stand for an address."""
    found = address_in(_run("scontrol", "--oneliner", "show", "node", node))
    return found or node


def address_in(shown: str) -> str | None:
    """NodeAddr of what `scontrol --oneliner show node` prints."""
    match = re.search(r"\bNodeAddr=(\S+)", shown)
    return None if match is None or match[1] == "(null)" else match[1]


def steps(job: str) -> dict[str, str]:
    """The running steps of a job, from name to number ("12.3")."""
    lines = _run("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j").splitlines()
    found = (line.strip().partition(" ") for line in lines)
    return {name: number for number, _, name in found if number.startswith(f"{job}.")}


def signal_step(number: str, name: str) -> None:
    """Send a signal to every process of a step.

    SLURM 22.05 delivers it and still complains of an "Invalid job id" when the step is not on all nodes of its job, so its status says
    nothing: whoever asks has to see that what was asked for happens.
    """
    _started("scancel", f"--signal={name}", number)


def requeue(name: str) -> None:
    """End a job and put it back into the queue; SLURM ends the caller too.

    Raises:
        AsyncmoeError: SLURM refuses, in its words.
    """
    ended = _started("scontrol", "requeue", name)
    if ended.returncode > 0:  # below 0: SLURM was so quick to end us that it ended this command too
        raise _refused(ended)


def running(name: str) -> bool:
    """False when a job was cancelled or its time is over. A heterogeneous job has a state for each component."""
    return set(_run("squeue", "--noheader", f"--jobs={name}", "--format=%T").split()) == {"RUNNING"}


def seconds_left(name: str) -> float | None:
    """Until the time limit of a job; None when there is none or SLURM does not say."""
    return parse_left(_run("squeue", "--noheader", f"--jobs={name}", "--format=%L"))


def parse_left(text: str) -> float | None:
    """Seconds of "1-02:03:04", "03:04" or "4"; None for "UNLIMITED" and the like."""
    line = text.split()[0] if text.split() else ""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(?:(\d+):)?(\d+)", line)
    if match is None:
        return None
    days = int(match[1] or 0)
    parts = [int(part) for part in line.partition("-")[2].split(":")] if match[1] else [int(part) for part in line.split(":")]
    return float(days * 86400 + sum(part * 60**power for power, part in enumerate(reversed(parts))))


def _run(*command: str) -> str:
    ended = _started(*command)
    if ended.returncode != 0:
        raise _refused(ended)
    return ended.stdout


def _refused(ended: subprocess.CompletedProcess[str]) -> AsyncmoeError:
    words = " ".join((ended.stderr or ended.stdout).split())
    return AsyncmoeError(f"{' '.join(ended.args)}: status {ended.returncode}: {words}")


def _started(*command: str) -> subprocess.CompletedProcess[str]:
    begin = time.monotonic()
    try:
        return subprocess.run(list(command), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise WaitTimeout(command[0], f"{' '.join(command)}; is slurmctld up? (scontrol ping)", time.monotonic() - begin) from None
    except FileNotFoundError:
        raise AsyncmoeError(f"{command[0]}: no such command; SLURM's commands must be in the PATH of the job") from None
