"""SLURM's own commands, each with a timeout."""

from __future__ import annotations

import re
import subprocess
import time

from asyncmoe.errors import AsyncmoeError, WaitTimeout

_ANSWER_S = 60.0
"""Timeout in seconds; long, because slurmctld of a large site can be busy."""


def hostnames(nodelist: str) -> tuple[str, ...]:
    """Expand a node list such as "n[1-3]", in SLURM's order."""
    return tuple(_run("scontrol", "show", "hostnames", nodelist).split())


def address(node: str) -> str:
    """Return the address at which SLURM reaches a node, whose name need not resolve."""
    found = fact("node", node, "NodeAddr")
    return node if found in ("", "(null)") else found


def fact(kind: str, name: str, key: str) -> str:
    """Return a value of `scontrol show job` or `show node`; empty if it has none."""
    match = re.search(rf"(?:^|\s){key}=(\S*)", _run("scontrol", "--oneliner", "show", kind, name))
    return "" if match is None else match[1]


def steps(job: str) -> dict[str, str]:
    """Return the numbers ("12.3") of a job's running steps, by step name."""
    lines = _run("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j").splitlines()
    found = (line.strip().partition(" ") for line in lines)
    return {name: number for number, _, name in found if number.startswith(f"{job}.")}


def signal_step(number: str, name: str) -> None:
    """Send a signal to every process of a step.

    SLURM 22.05 delivers the signal and still reports "Invalid job id" if the step is not on all nodes of its job, so the status of the
    command is ignored: the caller must check the effect of the signal.
    """
    _started("scancel", f"--signal={name}", number)


def requeue(name: str) -> None:
    """End a job and requeue it; SLURM ends the caller too.

    Raises:
        AsyncmoeError: SLURM refuses; the message is SLURM's.
    """
    ended = _started("scontrol", "requeue", name)
    if ended.returncode > 0:  # negative if SLURM already ended this command together with the job
        raise _refused(ended)


def running(name: str) -> bool:
    """Return false if a job was cancelled or reached its time limit."""
    return fact("job", name, "JobState") == "RUNNING"


def preempted(name: str) -> bool:
    """Return whether SLURM has chosen to preempt a job; its steps get SIGTERM as a warning if its partition has a grace time."""
    return fact("job", name, "PreemptTime")[:1].isdigit()


def seconds_left(name: str) -> float | None:
    """Return the seconds until a job's time limit; None if there is no limit or SLURM does not report it."""
    return parse_left(_run("squeue", "--noheader", f"--jobs={name}", "--format=%L"))


def parse_left(text: str) -> float | None:
    """Return the seconds in "1-02:03:04", "03:04" or "4"; None for words such as "UNLIMITED"."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


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
