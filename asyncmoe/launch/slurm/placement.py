"""Placement of a run's parts on the nodes of an allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncmoe.config import Config, devices
from asyncmoe.errors import ConfigError, UserError
from asyncmoe.launch.slurm.allocation import Allocation

_PORTS = range(20000, 32000)
"""Below Linux's ephemeral ports (32768 and above)."""


@dataclass(frozen=True)
class Placement:
    """Nodes by part. The controller runs on the node of `engines[0]`.

    Attributes:
        engines: engine nodes, each with the numbers of its engines: ("n1", (0, 1)).
        trainers: trainer nodes, in rank order.
        ranks: trainer ranks on each trainer node.
        unused: nodes of the allocation without a part.
    """

    engines: tuple[tuple[str, tuple[int, ...]], ...]
    trainers: tuple[str, ...]
    ranks: int
    unused: tuple[str, ...] = ()

    @property
    def controller(self) -> str:
        return self.engines[0][0]


def place(allocation: Allocation, config: Config) -> Placement:
    """Place the engines on the first nodes and the trainer on the next ones; in a heterogeneous job, the engines on the first component
    and the trainer on the second. Both share the node of a one-node job.

    Raises:
        UserError: too few nodes, or a number of components that is not two.
        ConfigError: engines that cannot be spread over their nodes.
    """
    cluster = config.cluster
    if config.engines.count < cluster.engine_nodes:
        raise ConfigError("cluster.engine_nodes", got=cluster.engine_nodes, expected=f"at most engines.count = {config.engines.count}")
    engines, trainers, unused = _split(allocation, cluster.engine_nodes, cluster.trainer_nodes)
    return Placement(spread(engines, config.engines.count), trainers, config.trainer.ranks // cluster.trainer_nodes, unused)


def _split(allocation: Allocation, engines: int, trainers: int) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    groups = allocation.groups
    if len(groups) == 1:
        nodes = groups[0].nodes
        if len(nodes) == 1 and (engines, trainers) == (1, 1):
            return nodes, nodes, ()
        wanted = f"{engines + trainers} = cluster.engine_nodes {engines} + cluster.trainer_nodes {trainers}"
        cure = f"sbatch --nodes={engines + trainers} ..., or lower cluster.engine_nodes or cluster.trainer_nodes"
        _check(f"nodes of job {allocation.name}", nodes, engines + trainers, wanted, cure)
        return nodes[:engines], nodes[engines : engines + trainers], nodes[engines + trainers :]
    if len(groups) != 2:
        raise UserError(
            f"components of heterogeneous job {allocation.name}", got=len(groups), expected="2: the engines' and then the trainer's"
        )
    for group, what, number in zip(groups, ("engine", "trainer"), (engines, trainers), strict=True):
        cure = f"raise --nodes of that component, or lower cluster.{what}_nodes"
        _check(f"nodes of component {group.index} of job {allocation.name}", group.nodes, number, f"cluster.{what}_nodes {number}", cure)
    first, second = groups
    return first.nodes[:engines], second.nodes[:trainers], (*first.nodes[engines:], *second.nodes[trainers:])


def _check(what: str, nodes: Sequence[str], wanted: int, expected: str, cure: str) -> None:
    if len(nodes) < wanted:
        raise UserError(what, got=f"{len(nodes)} ({', '.join(nodes)})", expected=f"at least {expected}", cure=cure)


def spread(nodes: Sequence[str], count: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Spread `count` numbers over nodes in order and as evenly as possible: 5 over two nodes gives 0, 1, 2 and 3, 4."""
    edges = [-(-count * place // len(nodes)) for place in range(len(nodes) + 1)]
    return tuple((node, tuple(range(*edges[place : place + 2]))) for place, node in enumerate(nodes))


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


def master_port(job: int, restarts: int) -> int:
    """Return the rendezvous port of the trainer's ranks. It differs between jobs that share a node and between starts of a job."""
    return _PORTS[(job * 7 + restarts * 1009) % len(_PORTS)]
