"""Which nodes a run needs of a Ray cluster, with what, and what is started on each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.launch.torchrun import TRAINER_ENVIRONMENT, torchrun
from asyncmoe.rpc import address

CONTROLLER = "controller"
_PASSED = ("ASYNCMOE_", "NCCL_", "GLOO_", "UCX_", "SGLANG_", "TORCH_", "HF_", "OMP_")
"""Variables that say how to run rather than where: they are for every node."""


@dataclass(frozen=True)
class Bundle:
    """What one node gives to one part of a run.

    Attributes:
        part: what runs there; the controller lives with the first engines.
        node: number of the node among those of its part.
        numbers: of the engines, or the trainer's ranks.
        cpus, gpus: what Ray reserves there.
    """

    part: Literal["engines", "trainer"]
    node: int
    numbers: tuple[int, ...]
    cpus: int
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """As Ray counts them."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}

    @property
    def title(self) -> str:
        """What it is for, in words."""
        numbers = f"{self.numbers[0]}" if len(self.numbers) == 1 else f"{self.numbers[0]}-{self.numbers[-1]}"
        if self.part == "trainer":
            return f"trainer rank {numbers}"
        return f"{'controller and ' if self.node == 0 else ''}engine {numbers}"


@dataclass(frozen=True)
class Launch:
    """A process to start on a node.

    Attributes:
        name: what messages call it.
        arguments: of the node's Python.
        log: file for what it writes.
        environment: variables on top of the node's.
    """

    name: str
    arguments: tuple[str, ...]
    log: Path
    environment: Mapping[str, str]


def bundles(config: Config, gpus: bool) -> tuple[Bundle, ...]:
    """What to reserve: a bundle for every engine node, then one for every trainer node.

    A GPU for each rank of engines and trainer, and a CPU; without GPUs the CPUs alone.

    Args:
        gpus: the cluster has some.

    Raises:
        ConfigError: engines that cannot be spread over their nodes, or GPUs that Ray is not to choose.
    """
    cluster, ranks = config.cluster, config.trainer.ranks
    if config.engines.count < cluster.engine_nodes:
        raise ConfigError("cluster.engine_nodes", got=cluster.engine_nodes, expected=f"at most engines.count = {config.engines.count}")
    if config.engines.first_gpu:
        expected = "0 with launch: ray, which gives every node's engines GPUs of their own"
        raise ConfigError("engines.first_gpu", got=config.engines.first_gpu, expected=expected, cure="leave it out")

    def bundle(part: Literal["engines", "trainer"], node: int, numbers: range, size: int) -> Bundle:
        total = len(numbers) * size
        return Bundle(part, node, tuple(numbers), total, total if gpus else 0)

    engines = [
        bundle("engines", node, numbers, config.engines.tp)
        for node, numbers in enumerate(spread(config.engines.count, cluster.engine_nodes))
    ]
    trainers = [bundle("trainer", node, numbers, 1) for node, numbers in enumerate(spread(ranks, cluster.trainer_nodes))]
    return (*engines, *trainers)


def spread(count: int, nodes: int) -> list[range]:
    """`count` numbers over nodes in order, as evenly as they go: 5 over two nodes are 0, 1, 2 and 3, 4."""
    edges = [-(-count * node // nodes) for node in range(nodes + 1)]
    return [range(first, end) for first, end in pairwise(edges)]


def strategy(wanted: Sequence[Bundle]) -> Literal["PACK", "STRICT_SPREAD"]:
    """How Ray is to lay bundles over nodes: one each, or together where there is one of engines and one of the trainer."""
    return "PACK" if len(wanted) <= 2 else "STRICT_SPREAD"


def joining(config: Config, addresses: Sequence[str] = ()) -> Config:
    """The configuration of all processes of the run: engines join, and processes of several machines do not meet on loopback.

    Args:
        addresses: of the nodes, once they are known.
    """
    several = len(set(addresses)) > 1 and config.cluster.network == "loopback"
    cluster = config.cluster.model_copy(update={"network": "hostname"}) if several else config.cluster
    engines = config.engines.model_copy(update={"join": True, "first_gpu": 0})  # of the GPUs that Ray shows the engines of a node
    return config.model_copy(update={"engines": engines, "cluster": cluster})


def environment(config: Config, node: str, addresses: Sequence[str], ours: Mapping[str, str]) -> dict[str, str]:
    """Variables of every process on a node: those of the driver that say how to run, and at which address the node is reached.

    Ray's own address of a node, which is reached from all others, wins over what a host's name stands for, but not over a network that
    the user has named.

    Args:
        config: the user's.
        node: its address in Ray.
        addresses: of all nodes.
        ours: the driver's environment.
    """
    passed = {name: value for name, value in ours.items() if name.startswith(_PASSED) and name != address.VARIABLE}
    several = len(set(addresses)) > 1 and config.cluster.network == "loopback"
    return passed | ({address.VARIABLE: node} if several else {})


def launches(config: Config, file: Path, bundle: Bundle, master: tuple[str, int], variables: Mapping[str, str]) -> tuple[Launch, ...]:
    """What is started on a node, in order.

    Args:
        file: the configuration that all processes read.
        master: where the trainer's ranks meet.
        variables: of `environment`.
    """
    logs = config.run.dir.absolute() / "logs"
    if bundle.part == "trainer":
        nodes = config.cluster.trainer_nodes
        arguments = torchrun(len(bundle.numbers), master, "asyncmoe.trainer", str(file), node=bundle.node, nodes=nodes)
        name = "trainer" if nodes == 1 else f"trainer.{bundle.node}"
        return (_launch(name, arguments, logs, {**variables, **TRAINER_ENVIRONMENT}),)
    controller = [_launch(CONTROLLER, ["-m", "asyncmoe", "rollout", str(file)], logs, variables)] if bundle.node == 0 else []
    engines = []
    for index, number in enumerate(bundle.numbers):
        arguments = ["-m", "asyncmoe", "engine", str(file), "--name", f"engine.{number}", "--index", str(index)]
        engines.append(_launch(f"engine.{number}", arguments, logs, variables, "-joins"))
    return (*controller, *engines)


def _launch(name: str, arguments: Sequence[str], logs: Path, variables: Mapping[str, str], suffix: str = "") -> Launch:
    # engine-0.log is what the server writes.
    return Launch(name, tuple(arguments), logs / f"{name.replace('.', '-')}{suffix}.log", variables)


def wanted_words(wanted: Sequence[Bundle]) -> str:
    """What is reserved, in words: "3 nodes: 2 CPUs for controller and engine 0, 1 CPU for trainer rank 0, ..."."""
    parts = ", ".join(f"{_resources(bundle.resources)} for {bundle.title}" for bundle in wanted)
    where = f"{len(wanted)} nodes" if strategy(wanted) == "STRICT_SPREAD" else "1 node, or 2"
    return f"{where}: {parts}"


def nodes_words(nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]) -> str:
    """What a cluster has, in words: "1 node with 8 CPUs, 2 nodes with 4 CPUs; free: 9 CPUs"."""
    largest = sorted(nodes, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0)), reverse=True)
    alike = Counter(_resources(node) for node in largest)
    each = ", ".join(f"{_counted(count, 'node')} with {what}" for what, count in alike.items()) or "no node"
    return f"{each}; free: {_resources(free)}"


def _resources(amounts: Mapping[str, float]) -> str:
    gpus = amounts.get("GPU", 0.0)
    return _counted(amounts.get("CPU", 0.0), "CPU") + (f" and {_counted(gpus, 'GPU')}" if gpus else "")


def _counted(amount: float, what: str) -> str:
    return f"{amount:g} {what}{'' if amount == 1 else 's'}"
