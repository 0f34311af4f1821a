"""Which machines of a cluster hold which engines. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError


@dataclass(frozen=True)
class EngineMachine:
    """The engines of one machine.

    Attributes:
        numbers: of the engines.
        node: which one of each engine's `engines.nodes` the machine is.
    """

    numbers: tuple[int, ...]
    node: int = 0


def engine_machines(config: Config) -> tuple[EngineMachine, ...]:
    """Spread `engines.count` engines over `cluster.engine_nodes` machines, evenly and in order; an engine over several has neighbours.

    Raises:
        ConfigError: the engines cannot be spread so.
    """
    machines, engines = config.cluster.engine_nodes, config.engines
    if machines % engines.nodes:
        expected = f"a multiple of engines.nodes = {engines.nodes}, the machines of one engine"
        raise ConfigError("cluster.engine_nodes", got=machines, expected=expected)
    if engines.count * engines.nodes < machines:
        each = "" if engines.nodes == 1 else " * engines.nodes"
        raise ConfigError("cluster.engine_nodes", got=machines, expected=f"at most engines.count{each} = {engines.count * engines.nodes}")
    groups = spread(engines.count, machines // engines.nodes)
    return tuple(EngineMachine(tuple(numbers), node) for numbers in groups for node in range(engines.nodes))


def spread(count: int, nodes: int) -> list[range]:
    """Spread `count` numbers over nodes in order and as evenly as possible: 5 over two nodes gives 0, 1, 2 and 3, 4."""
    edges = [-(-count * node // nodes) for node in range(nodes + 1)]
    return [range(first, end) for first, end in pairwise(edges)]
