"""`asyncmoe stacks RUN`: what every process of a run on this host does at the moment, e.g. where it hangs.

The processes are those that the run recorded (`asyncmoe.telemetry.processes`) and their descendants; none is found by its name. py-spy
reads the Python stacks from outside, without the help of the process, which it stops for some milliseconds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncmoe import installed
from asyncmoe.errors import UserError
from asyncmoe.telemetry import processes
from asyncmoe.telemetry.processes import Recorded

_DUMP_S = 30.0
_MOST_COMMAND = 120
_MOST_OUTPUT = 200_000
"""Characters of a process's stacks that are shown."""


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
        UserError: no process of the run is on this host, or py-spy may not read the processes.
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
    py_spy = _py_spy()
    denied = 0
    for one in found:
        text = "" if py_spy is None else _dump(py_spy, one.pid)
        denied += "Permission Denied" in text or "Operation not permitted" in text
        yield "\n".join(filter(None, (_heading(one), text.strip())))
    if py_spy is None:
        yield f"no stacks: py-spy is not installed; run: {installed.fix('profile')}"
    if elsewhere:
        yield f"not covered: {elsewhere}; run the command there too"
    if denied:
        hint = "run the command as root, or allow it with: sysctl kernel.yama.ptrace_scope=0; in a container add the capability SYS_PTRACE"
        raise UserError("asyncmoe stacks", got=f"no permission to read {denied} of {len(found)} processes", expected="ptrace", hint=hint)


def tree(roots: Sequence[Recorded]) -> list[Found]:
    """Return processes and all their descendants, parents before children, each once."""
    import psutil

    roles = {one.pid: one.role for one in roots}
    found: dict[int, Found] = {}

    def add(process: Any, above: str = "") -> None:
        try:
            if process.pid in found or process.status() == psutil.STATUS_ZOMBIE:
                return
            role = roles.get(process.pid, "")
            found[process.pid] = _describe(process, role or f"child of {above}")
            for child in process.children():
                add(child, role or above)
        except psutil.NoSuchProcess:
            return  # it ended meanwhile

    # The supervisor is the parent of most: begin with it, so that the order is that of the tree.
    for one in sorted(roots, key=lambda one: one.started):
        try:
            add(psutil.Process(one.pid))
        except psutil.NoSuchProcess:
            continue
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


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _dump(py_spy: str, pid: int) -> str:
    """Return the stacks of all threads of a process, or why there are none."""
    try:
        done = subprocess.run(
            [py_spy, "dump", "--pid", str(pid)], capture_output=True, text=True, errors="replace", timeout=_DUMP_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no stacks: py-spy took more than {_DUMP_S:.0f} s"
    if done.returncode == 0:
        # Its first lines repeat the pid and the command.
        text = done.stdout.partition("\n\n")[2] or done.stdout
        return text if len(text) <= _MOST_OUTPUT else f"{text[:_MOST_OUTPUT]}\n[cut at {_MOST_OUTPUT} characters]"
    why = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"no stacks: {why[0] if why else f'py-spy ended with status {done.returncode}'}"
