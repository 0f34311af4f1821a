"""The `srun` command of every part of a run. Pure: this module starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.launch.slurm.allocation import Allocation
from asyncmoe.launch.slurm.placement import Placement

CONTROLLER, TRAINER = "controller", "trainer"


@dataclass(frozen=True)
class JobStep:
    """One job step.

    Attributes:
        name: "controller", "trainer", "engine.0"; also the step's name in `squeue --steps`.
        job: job number that `squeue --steps` shows, see `allocation.JobComponent`.
        nodes: nodes of the step, one task on each.
        command: the whole `srun` command.
        output: output file of srun, and of a task until it opens its log.
        logs: log of each node's task, see `log_of`.
    """

    name: str
    job: str
    nodes: tuple[str, ...]
    command: tuple[str, ...]
    output: Path
    logs: Mapping[str, Path]


@dataclass(frozen=True)
class Container:
    """Container flags that Pyxis adds to `srun` on sites with enroot (https://github.com/NVIDIA/pyxis).

    Attributes:
        image: value of --container-image; None: no container.
        mounts: value of --container-mounts; the checkout, the run directory and the model must have the same paths in the container.
        python: the interpreter that has asyncmoe where steps run.
    """

    image: str | None
    mounts: str | None
    python: str

    @property
    def flags(self) -> list[str]:
        image = [] if self.image is None else [f"--container-image={self.image}"]
        return image + ([] if self.mounts is None else [f"--container-mounts={self.mounts}"])


def container(environ: Mapping[str, str], executable: str) -> Container:
    """Read ASYNCMOE_CONTAINER_IMAGE, ASYNCMOE_CONTAINER_MOUNTS and ASYNCMOE_CONTAINER_PYTHON; without an image, `executable` runs."""
    image = environ.get("ASYNCMOE_CONTAINER_IMAGE") or None
    if image is None:
        return Container(None, None, executable)
    return Container(image, environ.get("ASYNCMOE_CONTAINER_MOUNTS") or None, environ.get("ASYNCMOE_CONTAINER_PYTHON") or "python3")


def log_of(logs: Path, name: str, node: str) -> Path:
    """Return the log of a step's task on a node."""
    return logs / f"{name}.{node}.log"


def srun(allocation: Allocation, name: str, nodes: Sequence[str], logs: Path, where: Container, arguments: Sequence[str]) -> JobStep:
    """Return a step that runs one `asyncmoe.launch.slurm.task` on each of `nodes`, all of one component.

    - `--overlap`: engines and the controller share a node, but by default a step has exclusive use of its CPUs and GPUs.
    - `--cpu-bind=none`: a task would be bound to one core, but starts many processes.
    - `--mpi=none`: tasks do not use MPI, so SLURM need not start a PMIx server.
    - `--kill-on-bad-exit`: otherwise ranks wait long for the ranks of a node whose task has ended.
    """
    group = allocation.group_of(nodes[0])
    flags = [f"--job-name={name}", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
    flags += [f"--nodelist={','.join(nodes)}", "--kill-on-bad-exit=1", "--cpu-bind=none", "--mpi=none", *where.flags]
    if group.index is not None:
        flags.append(f"--het-group={group.index}")
    program = [where.python, "-m", "asyncmoe.launch.slurm.task", str(logs), name, *arguments]
    files = {node: log_of(logs, name, node) for node in nodes}
    return JobStep(name, group.job, tuple(nodes), ("srun", *flags, *program), logs / f"srun.{name}.log", files)


def all_steps(
    allocation: Allocation, placement: Placement, config: Config, resolved: Path, master: tuple[str, int], where: Container
) -> list[JobStep]:
    """Return the steps of controller, engines and trainer, in this order.

    Args:
        master: rendezvous address and port of the trainer's ranks.
    """
    logs = config.run.dir / "logs"
    steps = [srun(allocation, CONTROLLER, [placement.controller], logs, where, ["rollout", str(resolved)])]
    for node, numbers in placement.engines:
        for index, number in enumerate(numbers):
            name = f"engine.{number}"
            steps.append(srun(allocation, name, [node], logs, where, engine(resolved, name, index)))
    address, port = master
    shape = [",".join(placement.trainers), str(placement.ranks), address, str(port)]
    steps.append(srun(allocation, TRAINER, placement.trainers, logs, where, ["trainer", str(resolved), *shape]))
    return steps


def engine(resolved: Path, name: str, index: int) -> list[str]:
    """Return the task arguments of an engine, the `index`-th of its node."""
    return ["engine", str(resolved), name, str(index)]
