"""A run in one allocation: start all parts as steps, supervise them, and end them in any case."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from asyncmoe import checkpoints
from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, Interrupted
from asyncmoe.launch import commands, local, watch
from asyncmoe.launch.commands import Launch, Launcher
from asyncmoe.launch.rule import CONTROLLER
from asyncmoe.launch.run_processes import RunParts
from asyncmoe.launch.slurm import control, outcome, parts, steps
from asyncmoe.launch.slurm.command import Stop
from asyncmoe.launch.slurm.parts import SlurmPart
from asyncmoe.launch.slurm.steps import Allocation
from asyncmoe.launch.watch import Stopping
from asyncmoe.models.hub import with_local_model

_SIGNALLED_S = 300.0
"""Seconds before the time limit at which SLURM sends SIGUSR1, as slurm/train.sbatch requests."""
_KEPT_S = 45.0
"""Seconds reserved before the time limit to end parts that did not stop by themselves, and to requeue."""
_UNLIMITED_S = 3600.0
"""Maximum seconds for a last step and its checkpoint, if the time limit is far away."""


def run(path: Path, overrides: Sequence[str], stop: Stop) -> None:
    """Run a configuration in this allocation, or resume it from its newest checkpoint.

    Returns when the run is finished or the job is requeued.

    Raises:
        UserError: the configuration, the model, the allocation or the run directory cannot be used.
        AsyncmoeError: a part failed (the error is the root cause), or the run was stopped.
    """
    where = steps.read_allocation(os.environ, control.hostnames)
    config = configuration.load(path, overrides)
    config = with_local_model(configuration.load(path, [*overrides, *steps.implied(where, config)]))
    placed = steps.place(where, config)
    if (gpus := os.environ.get("SLURM_GPUS_ON_NODE", "")).isdecimal():
        steps.check_gpus(placed, config, int(gpus))
    address, started = control.address(placed.trainers[0]), list[SlurmPart]()
    with local.claim(config.run.dir):
        table = _table(where, placed, config, local.prepare(config), address, started)
        before = checkpoints.newest(config.run.dir)
        print(_describe(where, placed, config, before), flush=True)
        cause = None
        try:
            watch.watch(config, table, partial(parts.end_all, where.name, started), _stopping(where, stop))
        except Interrupted:
            pass
        except AsyncmoeError as error:
            cause = error
        outcome.conclude(where, config, before, cause, stop)


def _describe(where: Allocation, placed: steps.Placement, config: Config, newest: Path | None) -> str:
    start = "starts" if newest is None else f"resumes from {newest.name}"
    engines = ", ".join(f"{node} ({len(machine.numbers)})" for node, machine in placed.engines)
    unused = f"; not used: {', '.join(placed.unused)}" if placed.unused else ""
    ranks = config.trainer.ranks // len(placed.trainers)
    return (
        f"job {where.name} {start}: controller on {placed.controller}; engines on {engines}; {ranks} trainer rank(s) on each of "
        f"{', '.join(placed.trainers)}{unused}; logs in {config.run.dir / 'logs'}"
    )


def _table(where: Allocation, placed: steps.Placement, config: Config, file: Path, address: str, started: list[SlurmPart]) -> RunParts:
    """Return the parts, whose processes are steps; each step is added to `started`, to be ended even if a later one fails to start."""
    program = steps.program(os.environ, sys.executable)

    def start(node: str, launch: Launch) -> SlurmPart:
        command = steps.srun([node], 1, program, launch.name, ["-m", "asyncmoe.launch.slurm.task", *launch.arguments])
        started.append(SlurmPart(launch.name, node, command, launch.log.parent, launch.environment))
        return started[-1]

    def end(name: str) -> None:
        # The steps of a trainer on several nodes are trainer.0, trainer.1 ...
        parts.end_all(where.name, [part for part in started if name in (part.step, part.step.partition(".")[0])])

    def master(epoch: int) -> tuple[str, int]:
        return address, steps.master_port(where.job, where.restarts, epoch)

    return commands.table(config, file, Launcher(placed.engines, placed.trainers, start, end, master))


def _stopping(where: Allocation, stop: Stop) -> Stopping:
    return Stopping(
        asked=lambda: stop.save or stop.now,
        hurried=lambda: int(stop.now),
        at_once=lambda: outcome.told_to_end(where) if stop.now else None,
        tell=lambda _: parts.ask_to_stop(where.name, CONTROLLER),
        seconds=lambda: _time_to_save(where),
        settle_s=parts.SETTLE_S,
    )


def _time_to_save(where: Allocation) -> float:
    try:
        left = control.seconds_left(where.name)
    except AsyncmoeError as error:
        print(f"assuming that the time limit is {_SIGNALLED_S:.0f} s away: {error}", flush=True)
        left = _SIGNALLED_S
    return _UNLIMITED_S if left is None else min(max(left - _KEPT_S, 0.0), _UNLIMITED_S)
