"""The parts of a run on this machine, and what a launcher that was lost has left of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.engines.nodes import process_name
from asyncmoe.launch import local_trainer, rule
from asyncmoe.launch.rule import CONTROLLER, TRAINER
from asyncmoe.launch.run_processes import STOP_GRACE_S, Process, RunPart, RunParts
from asyncmoe.launch.torchrun import trainer_environment
from asyncmoe.process import Child, wait_until
from asyncmoe.rpc.environment import STARTS, TRAINER_EPOCH
from asyncmoe.telemetry import processes
from asyncmoe.telemetry.heartbeats import TRAINER as RANKS


class _Local:
    """The newest processes of all parts."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.children: dict[str, Child] = {}

    def start(self, name: str, command: list[str], log: str, more: Mapping[str, str]) -> tuple[Process, ...]:
        """Start a part; all of its starts append to one log."""
        config = self._config
        child = Child(name, command, config.run.dir / "logs" / log, more)
        self.children[name] = child
        return (child,)

    def end(self, name: str, grace_s: float) -> None:
        """End a part, after `grace_s` by SIGKILL: one that hangs or is stopped must not wake up beside the next."""
        if (child := self.children.get(name)) is not None:
            child.end(grace_s)
        if name == TRAINER:
            local_trainer.kill_ranks(self._config.run.dir)

    def end_all(self) -> None:
        """Ask all to end, and kill what does not in time."""
        for child in self.children.values():
            child.signal(signal.SIGTERM)
        for name in reversed(self.children):
            self.end(name, STOP_GRACE_S)


def table(config: Config, file: Path, ending: ExitStack) -> RunParts:
    """Return the parts, which `ending` ends. `file`: the configuration that all processes read."""
    local, python = _Local(config), [sys.executable, "-m", "asyncmoe"]
    ending.callback(local.end_all)

    def controller(epoch: int) -> tuple[Process, ...]:
        return local.start(CONTROLLER, [*python, "rollout", str(file)], "controller.log", {TRAINER_EPOCH: str(epoch)})

    def trainer(epoch: int) -> tuple[Process, ...]:
        more = trainer_environment(os.environ) | {TRAINER_EPOCH: str(epoch)}
        return local.start(TRAINER, local_trainer.trainer_command(config, file), "trainer.log", more)

    def engine(index: int, node: int) -> Callable[[int], tuple[Process, ...]]:
        name = f"engine.{index}"
        arguments = ["engine", str(file), "--name", name, "--index", str(index), *(["--node", str(node)] if node else [])]
        own = process_name(name, node)
        # The log is kept apart from engine-0.log, which the server writes.
        return lambda starts: local.start(own, [*python, *arguments], f"{own.replace('.', '-')}-joins.log", {STARTS: str(starts)})

    count, nodes = (0 if config.engines.join else config.engines.count), config.engines.nodes
    engines = {process_name(f"engine.{index}", node): engine(index, node) for index in range(count) for node in range(nodes)}
    starts = {CONTROLLER: controller, **engines, TRAINER: trainer}
    rules = rule.table(config, list(engines), spare=True)
    ends = {name: partial(local.end, name, STOP_GRACE_S if name == TRAINER else 0.0) for name in starts}
    return RunParts({name: RunPart(rules[name], start, ends[name]) for name, start in starts.items()})


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
        for one in filter(processes.runs, left):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(one.pid, signal.SIGKILL)
