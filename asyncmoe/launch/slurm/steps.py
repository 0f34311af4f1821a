"""The plan of a run: the nodes of every part, and its `srun` command. Pure: this module starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from asyncmoe.config import Config, devices
from asyncmoe.engines.nodes import process_name
from asyncmoe.errors import UserError
from asyncmoe.launch.engine_machines import EngineMachine, engine_machines
from asyncmoe.launch.slurm.allocation import Allocation
from asyncmoe.launch.slurm.task import log_of

CONTROLLER, TRAINER = "controller", "trainer"
_PORTS = range(20000, 32000)
"""Below Linux's ephemeral ports (32768 and above)."""


@dataclass(frozen=True)
class Placement:
    """Nodes by part. The controller runs on the node of `engines[0]`.

    Attributes:
        engines: engine nodes, each with its engines: ("n1", EngineMachine((0, 1))).
        trainers: trainer nodes, in rank order.
        ranks: trainer ranks on each trainer node.
        unused: nodes of the allocation without a part.
    """

    engines: tuple[tuple[str, EngineMachine], ...]
    trainers: tuple[str, ...]
    ranks: int
    unused: tuple[str, ...] = ()

    @property
    def controller(self) -> str:
        return self.engines[0][0]


@dataclass(frozen=True)
class JobStep:
    """One job step.

    Attributes:
        name: "controller", "trainer", "engine.0"; also the step's name in `squeue --steps`.
        job: job number that `squeue --steps` shows, see `allocation.JobComponent`.
        nodes: nodes of the step, one task on each.
        command: the whole `srun` command.
        output: output file of srun, and of a task until it opens its log.
        logs: log of each node's task, see `asyncmoe.launch.slurm.task.log_of`.
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


def place(allocation: Allocation, config: Config) -> Placement:
    """Place the engines on the first nodes and the trainer on the next ones; in a heterogeneous job, the engines on the first component
    and the trainer on the second. Both share the node of a one-node job.

    Raises:
        UserError: too few nodes, or a number of components that is not two.
        ConfigError: engines that cannot be spread over their nodes.
    """
    cluster, machines = config.cluster, engine_machines(config)
    engines, trainers, unused = _split(allocation, cluster.engine_nodes, cluster.trainer_nodes)
    return Placement(tuple(zip(engines, machines, strict=True)), trainers, config.trainer.ranks // cluster.trainer_nodes, unused)


def _split(allocation: Allocation, engines: int, trainers: int) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    groups = allocation.groups
    if len(groups) == 1:
        nodes = groups[0].nodes
        if len(nodes) == 1 and (engines, trainers) == (1, 1):
            return nodes, nodes, ()
        wanted = f"{engines + trainers} = cluster.engine_nodes {engines} + cluster.trainer_nodes {trainers}"
        hint = f"sbatch --nodes={engines + trainers} ..., or lower cluster.engine_nodes or cluster.trainer_nodes"
        _check(f"nodes of job {allocation.name}", nodes, engines + trainers, wanted, hint)
        return nodes[:engines], nodes[engines : engines + trainers], nodes[engines + trainers :]
    if len(groups) != 2:
        raise UserError(
            f"components of heterogeneous job {allocation.name}", got=len(groups), expected="2: the engines' and then the trainer's"
        )
    for group, what, number in zip(groups, ("engine", "trainer"), (engines, trainers), strict=True):
        hint = f"raise --nodes of that component, or lower cluster.{what}_nodes"
        _check(f"nodes of component {group.index} of job {allocation.name}", group.nodes, number, f"cluster.{what}_nodes {number}", hint)
    first, second = groups
    return first.nodes[:engines], second.nodes[:trainers], (*first.nodes[engines:], *second.nodes[trainers:])


def _check(what: str, nodes: Sequence[str], wanted: int, expected: str, hint: str) -> None:
    if len(nodes) < wanted:
        raise UserError(what, got=f"{len(nodes)} ({', '.join(nodes)})", expected=f"at least {expected}", hint=hint)


def implied(allocation: Allocation, config: Config) -> tuple[str, ...]:
    """Return the configuration overrides that an allocation implies: engines join; several nodes rendezvous by host name; on one node that
    other machines may reach, the engines' GPUs follow the trainer's; and a requeued job resumes."""
    one, local = len(allocation.nodes) == 1, config.cluster.network == "loopback"
    network = [] if one or not local else ["cluster.network=hostname"]
    behind = [f"engines.first_gpu={config.trainer.ranks}"] if one and not local and config.engines.first_gpu is None else []
    again = ["run.resume=true"] if allocation.restarts else []
    return ("engines.join=true", *network, *behind, *again)


def check_gpus(placed: Placement, config: Config, gpus: int) -> None:
    """Check that every process finds a GPU.

    Args:
        gpus: number of GPUs on every node.

    Raises:
        ConfigError: there are too few GPUs, or an engine and the trainer would use the same GPU.
    """
    several = placed.controller not in placed.trainers
    for asked in devices.wanted(config, several):
        devices.place(asked, gpus)


def master_port(job: int, restarts: int, epoch: int = 0) -> int:
    """Return the rendezvous port of the trainer's ranks. It differs between jobs that share a node, between starts of a job, and between
    starts of a trainer."""
    return _PORTS[(job * 7 + restarts * 1009 + epoch * 3001) % len(_PORTS)]


def container(environ: Mapping[str, str], executable: str) -> Container:
    """Read ASYNCMOE_CONTAINER_IMAGE, ASYNCMOE_CONTAINER_MOUNTS and ASYNCMOE_CONTAINER_PYTHON; without an image, `executable` runs."""
    image = environ.get("ASYNCMOE_CONTAINER_IMAGE") or None
    if image is None:
        return Container(None, None, executable)
    return Container(image, environ.get("ASYNCMOE_CONTAINER_MOUNTS") or None, environ.get("ASYNCMOE_CONTAINER_PYTHON") or "python3")


def srun(allocation: Allocation, name: str, nodes: Sequence[str], logs: Path, where: Container, arguments: Sequence[str]) -> JobStep:
    """Return a step that runs one `asyncmoe.launch.slurm.task` on each of `nodes`, all of one component.

    - `--overlap`: engines and the controller share a node, but by default a step has exclusive use of its CPUs and GPUs.
    - `--cpu-bind=none`: a task would be bound to one core, but starts many processes.
    - `--mpi=none`: tasks do not use MPI, so SLURM need not start a PMIx server.
    - `--kill-on-bad-exit`: otherwise ranks wait long for the ranks of a node whose task has ended.
    - `--wait=0`: the tasks of other nodes may end as late as they like after the first.
    - `--export=ALL`: a step has the batch script's variables also where `sbatch --export=NONE` started that without the user's.
    """
    group = allocation.group_of(nodes[0])
    flags = [f"--job-name={name}", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
    flags += [f"--nodelist={','.join(nodes)}", "--kill-on-bad-exit=1", "--wait=0", "--cpu-bind=none", "--mpi=none"]
    flags += ["--export=ALL", *where.flags]
    if group.index is not None:
        flags.append(f"--het-group={group.index}")
    program = [where.python, "-m", "asyncmoe.launch.slurm.task", str(logs), name, *arguments]
    files = {node: log_of(logs, name, node) for node in nodes}
    return JobStep(name, group.job, tuple(nodes), ("srun", *flags, *program), logs / f"srun.{name}.log", files)


def controller(allocation: Allocation, placement: Placement, config: Config, resolved: Path, where: Container, epoch: int = 0) -> JobStep:
    """Return the step of the controller. `epoch`: how often the trainer was started before."""
    arguments = ["rollout", str(resolved), str(epoch)]
    return srun(allocation, CONTROLLER, [placement.controller], config.run.dir / "logs", where, arguments)


def engines(
    allocation: Allocation, placement: Placement, config: Config, resolved: Path, where: Container
) -> dict[str, Callable[[int], JobStep]]:
    """Return the steps of the engines by name, each of a start with the number of those before it."""
    found, logs = dict[str, Callable[[int], JobStep]](), config.run.dir / "logs"
    for node, machine in placement.engines:
        for index, number in enumerate(machine.numbers):
            name, part = f"engine.{number}", machine.node
            step, task = process_name(name, part), engine(resolved, name, index, part)
            found[step] = partial(_again, partial(srun, allocation, step, [node], logs, where), task)
    return found


def _again(step: Callable[[Sequence[str]], JobStep], task: Sequence[str], starts: int) -> JobStep:
    return step([*task, str(starts)])


def trainer(
    allocation: Allocation,
    placement: Placement,
    config: Config,
    resolved: Path,
    master: tuple[str, int],
    where: Container,
    epoch: int = 0,
) -> JobStep:
    """Return the step of the trainer.

    Args:
        master: rendezvous address and port of the trainer's ranks.
        epoch: how often the trainer was started before.
    """
    address, port = master
    shape = [",".join(placement.trainers), str(placement.ranks), address, str(port), str(epoch)]
    return srun(allocation, TRAINER, placement.trainers, config.run.dir / "logs", where, ["trainer", str(resolved), *shape])


def engine(resolved: Path, name: str, index: int, node: int = 0) -> list[str]:
    """Return the task arguments of an engine, the `index`-th of its machine, or of one node of it; the number of earlier starts follows."""
    return ["engine", str(resolved), name, str(index), str(node)]
