"""The `srun` command of every part of a run. Pure: nothing is started here."""

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
        job: what `squeue --steps` knows it by, see `allocation.Group`.
        nodes: where it runs, one task on each.
        command: the whole `srun` command.
        output: where srun writes, and a task before it opens the log below.
        logs: for each node what its task writes, see `log_of`.
    """

    name: str
    job: str
    nodes: tuple[str, ...]
    command: tuple[str, ...]
    output: Path
    logs: Mapping[str, Path]


@dataclass(frozen=True)
class Container:
    """Pyxis' flags, which are those of `srun` where a site has enroot (https://github.com/NVIDIA/pyxis).

    Attributes:
        image: what --container-image takes; None: no container.
        mounts: what --container-mounts takes: the checkout, the run directory and the model must be there under the same paths.
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
    """From ASYNCMOE_CONTAINER_IMAGE, ASYNCMOE_CONTAINER_MOUNTS and ASYNCMOE_CONTAINER_PYTHON; `executable` runs where there is none."""
    image = environ.get("ASYNCMOE_CONTAINER_IMAGE") or None
    if image is None:
        return Container(None, None, executable)
    return Container(image, environ.get("ASYNCMOE_CONTAINER_MOUNTS") or None, environ.get("ASYNCMOE_CONTAINER_PYTHON") or "python3")


def log_of(logs: Path, name: str, node: str) -> Path:
    """What the task of a step writes on a node."""
    return logs / f"{name}.{node}.log"


def srun(allocation: Allocation, name: str, nodes: Sequence[str], logs: Path, where: Container, arguments: Sequence[str]) -> JobStep:
    """A step with one task of `asyncmoe.launch.slurm.task` on each of some nodes of one component.

    - `--overlap`: engines and the controller share a node, and by default a step keeps its CPUs and GPUs to itself.
    - `--cpu-bind=none`: one task would be bound to one core, and starts many processes.
    - `--mpi=none`: no PMIx server is started beside tasks that do not speak to it.
    - `--kill-on-bad-exit`: ranks of one node wait long for those of another that has ended.
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
    """Controller, engines, trainer.

    Args:
        master: address and port where the trainer's ranks meet.
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
    """Arguments of the task of one engine, the `index`-th of its node."""
    return ["engine", str(resolved), "--name", name, "--index", str(index)]
