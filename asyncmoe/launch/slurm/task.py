"""The task of a step on each of its nodes: `python -m asyncmoe.launch.slurm.task LOGS STEP ROLE CONFIG ...`.

Its output goes to a log of the step and the node. SLURM sends a signal to every process of a step. SIGURG asks a part to stop: only the
task handles it, by raising the signal that asks its part. SIGHUP ends all of them. With SIGTERM SLURM warns of the end of the job, as
before a preemption: all processes of a run block it but the controller's task, which takes it for SIGURG, and the trainer saves.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch import part, torchrun
from asyncmoe.process import say
from asyncmoe.rpc.environment import STARTS, TRAINER_EPOCH
from asyncmoe.storage import writing


def log_of(logs: Path, name: str, node: str) -> Path:
    """Return the log of a step's task on a node."""
    return logs / f"{name}.{node}.log"


def main() -> None:
    """Run the part that the arguments name to its end."""
    logs, step, role, *arguments = sys.argv[1:]
    node = os.environ["SLURMD_NODENAME"]
    try:
        _write_to(log_of(Path(logs), step, node), step)
        roles: dict[str, Callable[[str, list[str]], None]] = {"rollout": _rollout, "engine": _engine, "trainer": _trainer}
        if role != "joining":  # an engine of another job than the run's, which leaves
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        roles.get(role, _engine)(node, arguments)
    except AsyncmoeError as error:
        say(error)
        sys.exit(error.exit_code)


def _rollout(node: str, arguments: list[str]) -> None:
    stop_as(signal.SIGINT, signal.SIGURG, signal.SIGTERM)
    config, epoch = arguments
    os.environ[TRAINER_EPOCH] = epoch
    part.main(lambda: part.controller(Path(config)))
    part.end()


def _engine(node: str, arguments: list[str]) -> None:
    stop_as(signal.SIGINT, signal.SIGURG)
    config, name, index, number, *starts = arguments
    os.environ[STARTS] = "".join(starts)
    part.main(lambda: part.engine(Path(config), name=name, index=int(index), node=int(number)))


def _trainer(node: str, arguments: list[str]) -> None:
    config, nodes, ranks, address, port, epoch = arguments
    os.environ[TRAINER_EPOCH] = epoch
    names = nodes.split(",")
    # SLURM sorts the nodes of a step, but the rendezvous is on the first node of the argument.
    run_ranks(names.index(node), len(names), int(ranks), address, int(port), config)


def run_ranks(node: int, nodes: int, ranks: int, address: str, port: int, config: str) -> None:
    """Run this node's trainer ranks under torchrun to their end, then exit with the status of the root-cause rank.

    torchrun itself exits with 1 for every failure of a rank, but a job that failed by a user error must not be requeued.

    Args:
        node: index of this node among `nodes`; node 0 hosts the rendezvous at `address` and `port`.
        ranks: number of ranks on this node.

    Raises:
        AsyncmoeError: see `check_free`.
    """
    os.environ.update(torchrun.trainer_environment(os.environ))
    if node == 0:
        check_free(port)
    torchrun.run(torchrun.arguments_of(ranks, (address, port), "asyncmoe.trainer", config, node=node, nodes=nodes))


def check_free(port: int) -> None:
    """Check that a port of this node is free.

    Raises:
        AsyncmoeError: the port is in use. Not a user error, because the next start of the job takes another port.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise AsyncmoeError(f"port {port}, where the trainer's ranks meet: got one in use, expected a free one; start again") from None


def stop_as(number: signal.Signals, *asked: signal.Signals) -> None:
    """Send this process the signal `number` at the first of those in `asked`; a warning may be followed by the batch script's own request.

    A thread waits for them, because uvloop hears a signal that is raised in the handler of another one twice.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)

    def wait() -> None:
        signal.sigwait(asked)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, name="asked to stop", daemon=True).start()


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
