"""`asyncmoe stacks RUN`: what every process of a run on this host does at the moment, e.g. where it hangs.

The processes are those that the run recorded (`asyncmoe.telemetry.processes`) and their descendants; none is found by its name. The
processes of ours write their own stacks (`asyncmoe.telemetry.heartbeats`); of others, SGLang's among them, and of one that is stopped, it
shows the state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncmoe.errors import UserError
from asyncmoe.process import wait_until
from asyncmoe.telemetry import heartbeats, processes
from asyncmoe.telemetry.heartbeats import Beat
from asyncmoe.telemetry.processes import Recorded

_OWN_S, _WRITES_S = 3.0, 0.1
"""Seconds until a process begins to write its stacks, and for writing them, a line at a time."""
_MOST_COMMAND = 120


@dataclass(frozen=True)
class Found:
    """A running process of the run on this host. `role` is what it recorded, or "child of" the nearest ancestor that recorded one."""

    pid: int
    role: str
    state: str
    """Its state, threads and CPU time, in words."""
    command: str


def stacks(run_dir: Path) -> Iterator[str]:
    """Yield paragraphs: of each process its stacks, and at the end what is not covered.

    Raises:
        UserError: no process of the run is on this host.
    """
    if not any((run_dir / name).exists() for name in ("config.yaml", processes.FOLDER)):  # the directory of an engine that joins has one
        got = "a directory without config.yaml" if run_dir.is_dir() else "a file" if run_dir.exists() else "no such directory"
        raise UserError("asyncmoe stacks", got=f"{run_dir}: {got}", expected="the directory of a run (run.dir)")
    recorded = processes.read(run_dir)
    found = tree([one for one in recorded if processes.runs(one)])
    elsewhere = _elsewhere(recorded)
    if not found:
        hint = f"run the command on {elsewhere}" if elsewhere else None
        raise UserError("asyncmoe stacks", got=f"{run_dir}, which has no running process on this host", expected="a running run", hint=hint)
    beats = {beat.pid: beat for beat in heartbeats.read(run_dir).values()}
    for one in found:
        yield "\n".join(filter(None, (_heading(one), _own(run_dir, one, beats))))
    yield "of processes without stacks here, py-spy shows them: py-spy dump --pid PID, as root or with kernel.yama.ptrace_scope=0"
    if elsewhere:
        yield f"not covered: {elsewhere}; run the command there too"


def tree(roots: Sequence[Recorded]) -> list[Found]:
    """Return processes and all their descendants, parents before children, each once."""
    import psutil

    roles, found = {one.pid: one.role for one in roots}, dict[int, Found]()
    # Of the recorded ancestors of a process the nearest started last, and gives it its role.
    for root in sorted(roots, key=lambda one: one.started):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            process = psutil.Process(root.pid)
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    if one.status() != psutil.STATUS_ZOMBIE:
                        found[one.pid] = _describe(one, roles.get(one.pid, f"child of {root.role}"))
    return list(found.values())


def _describe(process: Any, role: str) -> Found:
    with process.oneshot():
        seconds = process.cpu_times()
        state = f"{process.status()}, {process.num_threads()} threads, {seconds.user + seconds.system:.0f} s of CPU time"
        command = " ".join(" ".join(process.cmdline()).split()) or process.name()  # a renamed process pads its command with blanks
    return Found(process.pid, role, state, command if len(command) <= _MOST_COMMAND else f"{command[:_MOST_COMMAND]} ...")


def _heading(one: Found) -> str:
    return f"== {one.role}, pid {one.pid}: {one.state}\n   {one.command}"


def _elsewhere(recorded: Sequence[Recorded]) -> str:
    """Describe the recorded processes of other hosts: "node2 (trainer.2, trainer.3)"; they may have ended."""
    hosts = dict.fromkeys(one.host for one in recorded if not processes.is_here(one))
    roles = {host: ", ".join(one.role for one in recorded if one.host == host and not processes.is_here(one)) for host in hosts}
    return "; ".join(f"{host} ({of})" for host, of in roles.items())


def _own(run_dir: Path, one: Found, beats: Mapping[int, Beat]) -> str:
    """Have a process write its own stacks, and return them; nothing if it is not one that does."""
    beat = beats.get(one.pid)
    # The signal ends a process that has no handler for it: the pid alone may be another's by now.
    if beat is None or not beat.dumps or beat.role != one.role:
        return ""
    path = heartbeats.stacks_file(run_dir, beat.role)
    with suppress(FileNotFoundError):
        os.truncate(path, 0)  # the process appends to it
    with suppress(ProcessLookupError):  # it ended meanwhile
        os.kill(one.pid, heartbeats.DUMP_SIGNAL)
    if not wait_until(lambda: path.exists() and path.stat().st_size > 0, _OWN_S):
        return f"no stacks: it did not write its own within {_OWN_S:.0f} s, as when it is stopped"
    time.sleep(_WRITES_S)
    return path.read_text(errors="replace").strip()
