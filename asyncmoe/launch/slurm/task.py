"""The task of a step on each of its nodes: `python -m asyncmoe.launch.slurm.task LOGS STEP ROLE CONFIG ...`.

Its output goes to a log of the step and the node. SLURM sends SIGURG to every process of a step; only the task handles it, by raising
the signal that asks its part to stop.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch import part
from asyncmoe.launch.slurm.steps import log_of
from asyncmoe.process import say
from asyncmoe.storage import writing


def main() -> None:
    """Run the part that the arguments name to its end."""
    logs, step, role, *arguments = sys.argv[1:]
    node = os.environ["SLURMD_NODENAME"]
    try:
        _write_to(log_of(Path(logs), step, node), step)
    except AsyncmoeError as error:
        say(error)
        sys.exit(error.exit_code)
    roles: dict[str, Callable[[str, list[str]], None]] = {"rollout": _rollout, "engine": _engine, "trainer": _trainer}
    roles[role](node, arguments)


def _rollout(node: str, arguments: list[str]) -> None:
    stop_as(signal.SIGINT)
    (config,) = arguments
    part.main(lambda: part.controller(Path(config)))


def _engine(node: str, arguments: list[str]) -> None:
    stop_as(signal.SIGTERM)
    config, name, index = arguments
    part.main(lambda: part.engine(Path(config), name=name, index=int(index)))


def _trainer(node: str, arguments: list[str]) -> None:
    from asyncmoe.launch.slurm import agent

    config, nodes, ranks, address, port = arguments
    names = nodes.split(",")
    # SLURM sorts the nodes of a step, but the rendezvous is on the first node of the argument.
    agent.run(names.index(node), len(names), int(ranks), address, int(port), config)


def stop_as(number: signal.Signals) -> None:
    """Raise the signal `number` in this process on SIGURG."""
    signal.signal(signal.SIGURG, lambda *_: signal.raise_signal(number))


def _write_to(log: Path, step: str) -> None:
    """Append standard output and error of this process and its children to `log`."""
    with writing(f"log of {step}", log):
        log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)


if __name__ == "__main__":
    main()
