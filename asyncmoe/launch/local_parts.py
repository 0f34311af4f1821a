"""The parts of a run on this machine, and what a launcher that was lost has left of them."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.launch import commands
from asyncmoe.launch.commands import Launch, Launcher
from asyncmoe.launch.engine_machines import EngineMachine
from asyncmoe.launch.rule import CONTROLLER, TRAINER
from asyncmoe.launch.run_processes import STOP_GRACE_S, Process, RunParts
from asyncmoe.launch.torchrun import free_port
from asyncmoe.process import Child, wait_until
from asyncmoe.telemetry import processes
from asyncmoe.telemetry.heartbeats import TRAINER as RANKS


class _Local:
    """The newest processes of all parts."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._children: dict[str, Child] = {}

    def start(self, _: None, launch: Launch) -> Process:
        """Start a part; all of its starts append to one log."""
        child = Child(launch.name, [sys.executable, *launch.arguments], launch.log, launch.environment)
        self._children[launch.name] = child
        return child

    def end(self, name: str, engine_s: float = 0.0) -> None:
        """End a part: the trainer is asked first, another killed after `engine_s`, as one that hangs must not wake up beside the next."""
        if (child := self._children.get(name)) is not None:
            child.end(STOP_GRACE_S if name == TRAINER else engine_s)
        if name == TRAINER:
            _kill(self._run_dir, RANKS)

    def end_all(self) -> None:
        """Ask all to end, and kill what does not in time."""
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        for name in reversed(self._children):
            self.end(name, STOP_GRACE_S)


def table(config: Config, file: Path, ending: ExitStack) -> RunParts:
    """Return the parts, which `ending` ends. `file`: the configuration that all processes read."""
    local = _Local(config.run.dir)
    ending.callback(local.end_all)
    numbers = tuple(range(0 if config.engines.join else config.engines.count))
    engines = [(None, EngineMachine(numbers, node)) for node in range(config.engines.nodes)]
    launcher = Launcher(engines, [None], local.start, local.end, lambda _: ("127.0.0.1", free_port("127.0.0.1")), spare=True)
    return commands.table(config, file, launcher)


def end_left(run_dir: Path, *, engines: bool) -> None:
    """Wait until all that a lost launcher of the run has left on this host has ended, and kill what does not end: each part gets SIGTERM
    with its launcher.

    Args:
        engines: whether launchers start engines here.
    """
    recorded = processes.read(run_dir)
    if any(processes.runs(one) for one in recorded if one.role == "supervisor"):
        return
    roles = (CONTROLLER, RANKS, *(["engine."] if engines else []))
    left = [one for one in recorded if one.role.startswith(roles) and processes.runs(one)]
    if not wait_until(lambda: not any(map(processes.runs, left)), STOP_GRACE_S):
        _kill(run_dir, *roles)


def _kill(run_dir: Path, *roles: str) -> None:
    """Send SIGKILL to every process of a run that still runs on this host and whose role begins with one of `roles`."""
    for one in processes.read(run_dir):
        if one.role.startswith(roles) and processes.runs(one):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(one.pid, signal.SIGKILL)
