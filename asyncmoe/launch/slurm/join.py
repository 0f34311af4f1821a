"""Engines of another allocation join a running training: `python -m asyncmoe.launch.slurm.join RUN_DIR_OR_CONFIG [ENGINES_PER_NODE]`.

Each engine is one step, on every node of this allocation. Engines leave on request (SIGTERM, SIGINT or SIGUSR1 to the batch script)
and end by themselves when the run is over. An engine that fails does not affect the others.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.engines.nodes import process_name
from asyncmoe.errors import ConfigError, UserError, WaitTimeout
from asyncmoe.launch import failures
from asyncmoe.launch.slurm import allocation, control, parts, steps
from asyncmoe.launch.slurm.allocation import Allocation
from asyncmoe.launch.slurm.command import Stop, main
from asyncmoe.launch.slurm.parts import Part
from asyncmoe.process import wait_until

_POLL_S = 0.5
_LEAVE_S = 90.0
"""Seconds for engines to finish their work before they are killed; slurm/rollout.sbatch has its signal sent 120 s before the limit."""
_APPEARS_S = 180.0
"""Seconds to wait for the run's configuration if only the run directory is given."""


def run(arguments: Sequence[str], stop: Stop) -> None:
    """Run engines until the training is over or they are asked to leave.

    Raises:
        UserError: the arguments are invalid, or the run does not accept engines.
        WaitTimeout: the run's configuration did not appear.
        AsyncmoeError: an engine failed; the error is the root cause.
    """
    if not 1 <= len(arguments) <= 2:
        hint = "sbatch slurm/rollout.sbatch RUN_DIR [ENGINES_PER_NODE]"
        raise UserError("arguments", got=len(arguments), expected="a run directory, and perhaps a number of engines", hint=hint)
    where = allocation.read(os.environ, control.hostnames)
    config, resolved = _resolved(Path(arguments[0]), stop)
    each = number(arguments[1]) if len(arguments) == 2 else engines_each(config)
    planned = plan(where, config, resolved, each, steps.container(os.environ, sys.executable))
    print(f"job {where.name}: {each} engine(s) on each of {', '.join(where.nodes)} join {config.run.dir}", flush=True)
    started: list[Part] = []
    try:
        for step in planned:
            started.append(Part(step))
        _watch(started, stop)
    finally:
        parts.end_all(started)
    if failed := [part for part in started if part.returncode]:
        time.sleep(parts.SETTLE_S)
        raise failures.failure(failed)


def plan(where: Allocation, config: Config, resolved: Path, each: int, program: steps.Container) -> list[steps.JobStep]:
    """Return a step for every node of every engine, with names that are unique across jobs.

    Args:
        each: engines per node, or of engines over several nodes (`engines.nodes`), per group of so many.

    Raises:
        UserError: the nodes are no multiple of `engines.nodes`.
    """
    planned, nodes = list[steps.JobStep](), config.engines.nodes
    if len(where.nodes) % nodes:
        hint = f"sbatch --nodes={nodes} slurm/rollout.sbatch ..."
        expected = f"a multiple of engines.nodes = {nodes}"
        raise UserError(f"nodes of job {where.name}", got=len(where.nodes), expected=expected, hint=hint)
    for place, node in enumerate(where.nodes):
        head, number = where.nodes[place - place % nodes], place % nodes
        for index in range(each):
            name = f"engine.job{where.job}.{head}.{index}"
            task = ["joining", *steps.engine(resolved, name, index, number)[1:]]
            planned.append(steps.srun(where, process_name(name, number), [node], config.run.dir / "logs", program, task))
    return planned


def number(text: str) -> int:
    """Parse the user's number of engines per node.

    Raises:
        UserError: not a positive number.
    """
    if not text.isdigit() or int(text) == 0:
        raise UserError("ENGINES_PER_NODE", got=repr(text), expected="a number of at least 1")
    return int(text)


def engines_each(config: Config) -> int:
    """Return the number of engines per engine node of the run itself, or per group of nodes that share engines."""
    return -(-config.engines.count * config.engines.nodes // config.cluster.engine_nodes)


def _resolved(given: Path, stop: Stop) -> tuple[Config, Path]:
    """Wait for the configuration file that the processes of the run read, and return its content and path."""
    begin = time.monotonic()
    directory, limit_s = given, _APPEARS_S
    if given.is_file():
        asked = configuration.load(given)
        directory, limit_s = asked.run.dir, asked.engines.start_timeout_s
    resolved = directory / "config.yaml"
    while not resolved.is_file():
        waited = time.monotonic() - begin
        if waited > limit_s or stop.save or stop.now:
            raise WaitTimeout("the training", f"{resolved} does not exist; submit slurm/train.sbatch with run.dir={directory}", waited)
        time.sleep(_POLL_S)
    config = configuration.load(resolved)
    if not config.engines.join:
        hint = "start it with slurm/train.sbatch, or with engines.join=true"
        raise ConfigError(f"{resolved}: engines.join", got="false", expected="true: a run that engines may join", hint=hint)
    return config, resolved


def _watch(started: Sequence[Part], stop: Stop) -> None:
    def over() -> bool:
        return all(part.returncode is not None for part in started)

    wait_until(lambda: over() or stop.save or stop.now, math.inf)
    running = [part for part in started if part.returncode is None]
    wait_until(lambda: over() or parts.ask_to_stop(running), _LEAVE_S)
    wait_until(over, _LEAVE_S)


if __name__ == "__main__":
    main(run)
