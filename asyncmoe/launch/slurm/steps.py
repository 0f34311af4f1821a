"""The nodes that SLURM allocated to this job, and the plan of a run on them: the nodes of every part, and the `srun` command of every
process. Pure: this module starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncmoe.config import Config, devices
from asyncmoe.errors import ConfigError, UserError
from asyncmoe.launch.commands import EngineMachine, engine_machines

_PORTS = range(20000, 32000)
"""Below Linux's ephemeral ports (32768 and above)."""


@dataclass(frozen=True)
class Allocation:
    """The allocation of a running job.

    Attributes:
        job: SLURM_JOB_ID.
        name: the job's name for SLURM commands. The last task of an array has the number of the whole array, so tasks are named
            "ARRAY_TASK" (https://slurm.schedmd.com/job_array.html).
        restarts: how often the job was requeued.
        nodes: SLURM's node names, in SLURM's order.
    """

    job: int
    name: str
    restarts: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """Nodes by part. The controller runs on the node of `engines[0]`.

    Attributes:
        engines: engine nodes, each with its engines: ("n1", EngineMachine((0, 1))).
        trainers: trainer nodes, in rank order.
        unused: nodes of the allocation without a part.
    """

    engines: tuple[tuple[str, EngineMachine], ...]
    trainers: tuple[str, ...]
    unused: tuple[str, ...] = ()

    @property
    def controller(self) -> str:
        return self.engines[0][0]


def read_allocation(environ: Mapping[str, str], expand: Callable[[str], tuple[str, ...]]) -> Allocation:
    """Read the allocation from SLURM's variables.

    Args:
        expand: expands a node list such as "n[1-3]", as `control.hostnames` does through SLURM.

    Raises:
        UserError: this process is not in a SLURM job, or in a job of several components.
    """
    if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ:
        hint = "start it with: sbatch --nodes=N slurm/train.sbatch CONFIG; on a machine without SLURM: asyncmoe run CONFIG"
        raise UserError("SLURM_JOB_ID", got="no such variable", expected="a SLURM job", hint=hint)
    if "SLURM_HET_SIZE" in environ:
        hint = "nodes of another kind join with slurm/rollout.sbatch"
        raise UserError("job", got="a heterogeneous job", expected="a job of one component", hint=hint)
    job = environ["SLURM_JOB_ID"]
    name = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}" if "SLURM_ARRAY_JOB_ID" in environ else job
    return Allocation(int(job), name, int(environ.get("SLURM_RESTART_COUNT", "0")), expand(environ["SLURM_JOB_NODELIST"]))


def place(allocation: Allocation, config: Config) -> Placement:
    """Place the engines on the first nodes and the trainer on the next ones. Both share the node of a one-node job.

    Raises:
        UserError: too few nodes.
        ConfigError: engines that cannot be spread over their nodes.
    """
    cluster, machines, nodes = config.cluster, engine_machines(config), allocation.nodes
    engines, wanted = cluster.engine_nodes, cluster.engine_nodes + cluster.trainer_nodes
    if len(nodes) == 1 and wanted == 2:
        return Placement(((nodes[0], machines[0]),), nodes)
    if len(nodes) < wanted:
        expected = f"at least {wanted} = cluster.engine_nodes {engines} + cluster.trainer_nodes {cluster.trainer_nodes}"
        hint = f"sbatch --nodes={wanted} ..., or lower cluster.engine_nodes or cluster.trainer_nodes"
        raise UserError(f"nodes of job {allocation.name}", got=f"{len(nodes)} ({', '.join(nodes)})", expected=expected, hint=hint)
    return Placement(tuple(zip(nodes[:engines], machines, strict=True)), nodes[engines:wanted], nodes[wanted:])


def implied(allocation: Allocation, config: Config) -> tuple[str, ...]:
    """Return the configuration overrides that an allocation implies: engines join; several nodes rendezvous by host name; on one node with
    an address that other machines can reach, the engines' GPUs come after the trainer's.

    Raises:
        ConfigError: trainer and engines would use the same devices in turn.
    """
    if config.in_turn:
        hint = "start it on one node without slurm/train.sbatch: sbatch --nodes=1 --exclusive --wrap 'asyncmoe run CONFIG'"
        raise ConfigError("placement", got="colocated", expected="split because a SLURM job's engines have GPUs of their own", hint=hint)
    one, local = len(allocation.nodes) == 1, config.cluster.network == "loopback"
    network = [] if one or not local else ["cluster.network=hostname"]
    behind = [f"engines.first_gpu={config.trainer.ranks}"] if one and not local and config.engines.first_gpu is None else []
    return ("engines.join=true", *network, *behind)


def check_gpus(placed: Placement, config: Config, gpus: int) -> None:
    """Check that every process finds a GPU.

    Args:
        gpus: number of GPUs on every node.

    Raises:
        ConfigError: there are too few GPUs, or an engine and the trainer would use the same GPU.
    """
    for asked in devices.wanted(config, several=placed.controller not in placed.trainers):
        devices.place(asked, gpus)


def master_port(job: int, restarts: int, epoch: int = 0) -> int:
    """Return the rendezvous port of the trainer's ranks. It differs between jobs that share a node, between starts of a job, and between
    starts of a trainer."""
    return _PORTS[(job * 7 + restarts * 1009 + epoch * 3001) % len(_PORTS)]


def program(environ: Mapping[str, str], executable: str) -> tuple[str, ...]:
    """Return the interpreter that has asyncmoe where steps run, preceded by the flags with which srun starts it in a container.

    Read ASYNCMOE_CONTAINER_IMAGE, ASYNCMOE_CONTAINER_MOUNTS and ASYNCMOE_CONTAINER_PYTHON; without an image, `executable` runs. Pyxis adds
    the flags to srun on sites with enroot (https://github.com/NVIDIA/pyxis). The checkout, the run directory and the model must have the
    same paths in the container.
    """
    if not (image := environ.get("ASYNCMOE_CONTAINER_IMAGE")):
        return (executable,)
    mounts = environ.get("ASYNCMOE_CONTAINER_MOUNTS")
    flags = (f"--container-image={image}", *([f"--container-mounts={mounts}"] if mounts else []))
    return (*flags, environ.get("ASYNCMOE_CONTAINER_PYTHON") or "python3")


def srun(nodes: Sequence[str], tasks: int, program: Sequence[str], name: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a step that runs the Python arguments in `tasks` tasks on each of `nodes`; `program`: result of `program()`.

    - `--overlap`: engines and the controller share a node, but by default a step has exclusive use of its CPUs and GPUs.
    - `--cpu-bind=none`: by default a task, which starts many processes, would be bound to one core.
    - `--mpi=none`: tasks do not use MPI, so SLURM need not start a PMIx server.
    - `--wait=0`, `--kill-on-bad-exit=0`: engines that join do not affect each other.
    - `--export=ALL`: a step gets the batch script's variables, even if `sbatch --export=NONE` started the script without the user's.
    """
    flags = [f"--job-name={name}", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={tasks * len(nodes)}", f"--ntasks-per-node={tasks}"]
    flags += [f"--nodelist={','.join(nodes)}", "--wait=0", "--kill-on-bad-exit=0", "--cpu-bind=none", "--mpi=none", "--export=ALL"]
    return ("srun", *flags, *program, *arguments)
