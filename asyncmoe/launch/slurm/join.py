"""Engines of another allocation join a running training: `python -m asyncmoe.launch.slurm.join RUN_DIR_OR_CONFIG [ENGINES_PER_NODE]`.

All are tasks of one step, and none affects the others. Each leaves on request (SIGURG, which SLURM sends to every process of the step) and
ends by itself when the run is over.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, UserError, WaitTimeout
from asyncmoe.launch import part
from asyncmoe.launch.slurm import control, steps
from asyncmoe.launch.slurm.command import forget_options
from asyncmoe.launch.slurm.steps import Allocation
from asyncmoe.launch.slurm.task import stop_as
from asyncmoe.process import wait_until

_APPEARS_S = 180.0
"""Seconds to wait for the run's configuration."""


def run(arguments: list[str]) -> None:
    """Replace this process by the step that runs the engines.

    Raises:
        UserError: the arguments are invalid, or the run does not accept engines.
        WaitTimeout: the run's configuration did not appear.
    """
    from asyncmoe import config as configuration

    if len(arguments) not in (1, 2) or not all(one.isdecimal() and int(one) for one in arguments[1:]):
        hint = "sbatch slurm/rollout.sbatch RUN_DIR [ENGINES_PER_NODE]"
        raise UserError("arguments", got=" ".join(arguments), expected="a run directory, and optionally engines per node", hint=hint)
    where, given = steps.read_allocation(os.environ, control.hostnames), Path(arguments[0])
    file = (configuration.load(given).run.dir if given.is_file() else given) / "config.yaml"
    if not wait_until(file.is_file, _APPEARS_S):
        raise WaitTimeout("the training", f"{file} does not exist; submit slurm/train.sbatch with run.dir={file.parent}", _APPEARS_S)
    config = configuration.load(file)
    each = int(arguments[1]) if arguments[1:] else engines_each(config)
    command = step(where, config, file, each, steps.program(os.environ, sys.executable))
    print(f"job {where.name}: {each} engine(s) on each of {', '.join(where.nodes)} join {config.run.dir}", flush=True)
    os.execvp(command[0], command)


def step(where: Allocation, config: Config, file: Path, each: int, program: Sequence[str]) -> tuple[str, ...]:
    """Return the command of the step.

    Args:
        each: engines per node, or per group of `engines.nodes` nodes if an engine spans several.

    Raises:
        UserError: the number of nodes is not a multiple of `engines.nodes`, or the run does not accept engines.
    """
    nodes = config.engines.nodes
    if not config.engines.join:
        hint = "start the run with slurm/train.sbatch, or with engines.join=true"
        raise ConfigError(f"{file}: engines.join", got="false", expected="true: a run that engines may join", hint=hint)
    if len(where.nodes) % nodes:
        expected, hint = f"a multiple of engines.nodes = {nodes}", f"sbatch --nodes={nodes} slurm/rollout.sbatch ..."
        raise UserError(f"nodes of job {where.name}", got=len(where.nodes), expected=expected, hint=hint)
    task = ["-m", "asyncmoe.launch.slurm.join", "--task", str(file), str(nodes)]
    return steps.srun(where.nodes, each, ("--label", *program), "engines", task)


def engines_each(config: Config) -> int:
    """Return the number of engines per engine node of the run itself, or per group of nodes that share engines."""
    return -(-config.engines.count * config.engines.nodes // config.cluster.engine_nodes)


def _task(file: str, nodes: str) -> None:
    """Run the engine of this task. Its name is unique across jobs, by default from job and node; an engine's nodes share the name."""
    place, index = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_LOCALID"])
    group, node = divmod(place, int(nodes))
    name = f"engine.job{os.environ['SLURM_JOB_ID']}.group{group}.{index}" if int(nodes) > 1 else None
    part.engine(Path(file), name=name, index=index, node=node)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--task"]:
        stop_as(signal.SIGINT, signal.SIGURG)
        part.main(lambda: _task(*sys.argv[2:]))
        part.end()
    else:
        forget_options()
        part.main(lambda: run(sys.argv[1:]))
