"""`asyncmoe stacks RUN`: show what every process of a run on this host is doing, e.g. where it hangs.

The processes are those that the run recorded (`asyncmoe.telemetry.processes`), which write their own stacks
(`asyncmoe.telemetry.heartbeats`); none is looked up by name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from asyncmoe.errors import UserError
from asyncmoe.process import wait_until
from asyncmoe.telemetry import heartbeats, processes
from asyncmoe.telemetry.heartbeats import Beat
from asyncmoe.telemetry.processes import Recorded

_OWN_S, _WRITES_S = 3.0, 0.1
"""Maximum seconds until a process begins to write its stacks, and seconds it then gets to finish, because it writes a line at a time."""


def stacks(run_dir: Path) -> Iterator[str]:
    """Yield paragraphs: the stacks of each process, then what is not covered.

    Raises:
        UserError: no process of the run is on this host.
    """
    recorded = processes.read(run_dir) if run_dir.is_dir() else []
    here = [one for one in recorded if processes.runs(one)]
    elsewhere = _elsewhere([one for one in recorded if not processes.is_here(one)])
    if not here:
        got = f"{run_dir}, which has no running process on this host"
        hint = f"run the command on {elsewhere}" if elsewhere else None
        raise UserError("asyncmoe stacks", got=got, expected="the run.dir of a run in progress", hint=hint)
    beats = {beat.pid: beat for beat in heartbeats.read(run_dir).values()}
    for one in here:
        yield f"== {one.role}, pid {one.pid}\n{_own(run_dir, one, beats)}"
    yield "SGLang's processes are children of engines; py-spy dump --pid PID shows them, as root or with kernel.yama.ptrace_scope=0"
    if elsewhere:
        yield f"not covered: {elsewhere}; run the command there too"


def _elsewhere(recorded: Sequence[Recorded]) -> str:
    """Describe the recorded processes of other hosts: "node2 (trainer.2, trainer.3)"; they may have ended."""
    hosts = dict.fromkeys(one.host for one in recorded)
    return "; ".join(f"{host} ({', '.join(one.role for one in recorded if one.host == host)})" for host in hosts)


def _own(run_dir: Path, one: Recorded, beats: Mapping[int, Beat]) -> str:
    """Make a process write its own stacks, and return them."""
    beat = beats.get(one.pid)
    # The signal ends a process without a handler for it, and the pid may belong to another process by now.
    if beat is None or not beat.dumps or beat.role != one.role:
        return "no stacks: it has not begun its work"
    path = heartbeats.stacks_file(run_dir, beat.role)
    with suppress(FileNotFoundError):
        os.truncate(path, 0)  # the process appends to it
    with suppress(ProcessLookupError):  # it ended meanwhile
        os.kill(one.pid, heartbeats.DUMP_SIGNAL)
    if not wait_until(lambda: path.exists() and path.stat().st_size > 0, _OWN_S):
        return f"no stacks: it did not write its own within {_OWN_S:.0f} s, as when it is stopped"
    time.sleep(_WRITES_S)
    return path.read_text(errors="replace").strip()
