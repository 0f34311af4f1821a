"""The processes of a run, the same for every launcher: the engines of each machine, and the processes' names, commands and variables, as a
table of parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Generic, TypeVar

from asyncmoe.config import Config
from asyncmoe.engines.nodes import process_name
from asyncmoe.errors import ConfigError
from asyncmoe.launch import rule
from asyncmoe.launch.rule import CONTROLLER, TRAINER
from asyncmoe.launch.run_processes import Process, RunPart, RunParts
from asyncmoe.launch.torchrun import torchrun, trainer_environment
from asyncmoe.rpc.environment import STARTS, TRAINER_EPOCH

P = TypeVar("P")
Start = Callable[[int], tuple[Process, ...]]


@dataclass(frozen=True)
class EngineMachine:
    """The engines of one machine.

    Attributes:
        numbers: numbers of the engines.
        node: index of the machine among the `engines.nodes` machines of each engine.
    """

    numbers: tuple[int, ...]
    node: int = 0


@dataclass(frozen=True)
class Launch:
    """A process to start on a machine.

    Attributes:
        name: name of the process in messages.
        arguments: arguments of the machine's Python.
        log: file for the process's output.
        environment: variables added to the machine's environment.
    """

    name: str
    arguments: tuple[str, ...]
    log: Path
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Launcher(Generic[P]):
    """How and where a launcher starts processes; P is its type of machine.

    Attributes:
        engines: machines with their engines, at least one; the controller is on the first.
        trainers: machines of the trainer, in rank order.
        start: starts a process on a machine. Raises AsyncmoeError if it cannot be started.
        end: ends all processes of a part, given its name; see `RunPart.end`.
        master: returns address and port at which the trainer's ranks meet, given the number of the trainer's earlier starts.
        spare: see `rule.table`.
    """

    engines: Sequence[tuple[P, EngineMachine]]
    trainers: Sequence[P]
    start: Callable[[P, Launch], Process]
    end: Callable[[str], None]
    master: Callable[[int], tuple[str, int]]
    spare: bool = False


def engine_machines(config: Config) -> tuple[EngineMachine, ...]:
    """Spread `engines.count` engines over `cluster.engine_nodes` machines, evenly and in order; an engine over several machines gets
    adjacent ones.

    Raises:
        ConfigError: the engines cannot be spread evenly in this way.
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


def table(config: Config, file: Path, by: Launcher[P]) -> RunParts:
    """Return the parts of a run. `file`: the configuration that all processes read."""
    logs, nodes = config.run.dir.absolute() / "logs", len(by.trainers)

    def alone(place: P, name: str, arguments: Sequence[str], log: str, variable: str) -> Start:
        return lambda before: (by.start(place, Launch(name, ("-m", "asyncmoe", *arguments), logs / log, {variable: str(before)})),)

    def trainer(epoch: int) -> tuple[Process, ...]:
        ranks, master = config.trainer.ranks // nodes, by.master(epoch)
        more = trainer_environment(os.environ) | {TRAINER_EPOCH: str(epoch)}

        def start(node: int, place: P) -> Process:
            arguments = torchrun(ranks, master, "asyncmoe.trainer", str(file), node=node, nodes=nodes)
            name = TRAINER if nodes == 1 else f"{TRAINER}.{node}"
            return by.start(place, Launch(name, tuple(arguments), logs / f"{name.replace('.', '-')}.log", more))

        return tuple(start(node, place) for node, place in enumerate(by.trainers))

    engines = dict[str, Start]()
    for place, machine in by.engines:
        for index, number in enumerate(machine.numbers):
            name = process_name(f"engine.{number}", machine.node)
            arguments = ["engine", str(file), "--name", f"engine.{number}", "--index", str(index)]
            arguments += ["--node", str(machine.node)] if machine.node else []
            # The log is kept apart from engine-0.log, which the server writes.
            engines[name] = alone(place, name, arguments, f"{name.replace('.', '-')}-joins.log", STARTS)
    controller = alone(by.engines[0][0], CONTROLLER, ["rollout", str(file)], "controller.log", TRAINER_EPOCH)
    rules = rule.table(config, list(engines), spare=by.spare)
    starts = {CONTROLLER: controller, **engines, TRAINER: trainer}
    return {name: RunPart(rules[name], start, partial(by.end, name)) for name, start in starts.items()}
