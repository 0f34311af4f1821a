"""The nodes that a run needs from a Ray cluster, their resources, and the variables of their processes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.launch.commands import EngineMachine, engine_machines, spread
from asyncmoe.rpc import address

_PASSED = ("ASYNCMOE_", "NCCL_", "GLOO_", "UCX_", "SGLANG_", "TORCH_", "HF_", "OMP_")
"""Prefixes of the environment variables that all nodes share: they configure the run, not the node."""


@dataclass(frozen=True)
class Bundle:
    """One node's share of one part of a run.

    Attributes:
        title: the bundle's purpose in words.
        resources: what Ray reserves there: amounts by Ray's names.
        machine: the engines, on the first machine together with the controller; None: trainer ranks.
    """

    title: str
    resources: Mapping[str, float]
    machine: EngineMachine | None = None


def bundles(config: Config, gpus: bool) -> tuple[Bundle, ...]:
    """Return the bundles to reserve: one for every engine node, then one for every trainer node.

    A bundle has a CPU for each rank of engines and trainer, and with `gpus` also a GPU for each.

    Args:
        gpus: the cluster has GPUs.

    Raises:
        ConfigError: the engines cannot be spread over their nodes, or engines.first_gpu is set, though Ray chooses the GPUs.
    """
    machines, each = engine_machines(config), config.engines.ranks_per_node
    if config.engines.first_gpu:
        expected = "0 with launch: ray, which gives every node's engines GPUs of their own"
        raise ConfigError("engines.first_gpu", got=config.engines.first_gpu, expected=expected, hint="leave it out")

    def bundle(title: str, numbers: Sequence[int], size: int, machine: EngineMachine | None = None) -> Bundle:
        span = "-".join(dict.fromkeys((str(numbers[0]), str(numbers[-1]))))
        return Bundle(f"{title} {span}", dict.fromkeys(("CPU", "GPU") if gpus else ("CPU",), float(len(numbers) * size)), machine)

    first = "controller and engine"
    engines = [bundle("engine" if place else first, machine.numbers, each, machine) for place, machine in enumerate(machines)]
    trainers = [bundle("trainer rank", numbers, 1) for numbers in spread(config.trainer.ranks, config.cluster.trainer_nodes)]
    return (*engines, *trainers)


def strategy(wanted: Sequence[Bundle]) -> Literal["PACK", "STRICT_SPREAD"]:
    """Return Ray's placement strategy: a node for each bundle, or packed if there is one engine bundle and one trainer bundle."""
    return "PACK" if len(wanted) <= 2 else "STRICT_SPREAD"


def joining(config: Config, addresses: Sequence[str] = ()) -> Config:
    """Return the configuration of all processes: engines join, and processes on several machines do not rendezvous on loopback.

    Args:
        addresses: addresses of the nodes, once known.
    """
    several = len(set(addresses)) > 1 and config.cluster.network == "loopback"
    cluster = config.cluster.model_copy(update={"network": "hostname"}) if several else config.cluster
    engines = config.engines.model_copy(update={"join": True, "first_gpu": 0})  # Ray shows each node's engines only their GPUs
    return config.model_copy(update={"engines": engines, "cluster": cluster})


def environment(config: Config, node: str, addresses: Sequence[str], ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of every process on a node: the shared ones of the driver, and the address of the node.

    Ray's address of a node, which all other nodes reach, overrides the address that the host name resolves to, but not a network that
    the user configured.

    Args:
        config: the user's configuration.
        node: the node's address in Ray.
        addresses: addresses of all nodes.
        ours: the driver's environment.
    """
    passed = {name: value for name, value in ours.items() if name.startswith(_PASSED) and name != address.VARIABLE}
    several = len(set(addresses)) > 1 and config.cluster.network == "loopback"
    return passed | ({address.VARIABLE: node} if several else {})


def wanted_words(wanted: Sequence[Bundle]) -> str:
    """Describe the reservation: "3 nodes: 2 CPUs for controller and engine 0, 1 CPU for trainer rank 0, ..."."""
    parts = ", ".join(f"{resources_words(bundle.resources)} for {bundle.title}" for bundle in wanted)
    where = f"{len(wanted)} nodes" if strategy(wanted) == "STRICT_SPREAD" else "1 node, or 2"
    return f"{where}: {parts}"


def resources_words(amounts: Mapping[str, float]) -> str:
    """Describe resources: "8 CPUs and 1 GPU"."""
    counts = {what: amounts.get(what, 0.0) for what in ("CPU", "GPU")}
    return " and ".join(f"{count:g} {what}{'' if count == 1 else 's'}" for what, count in counts.items() if count or what == "CPU")
