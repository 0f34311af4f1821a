"""The actor on a node, which starts the processes of a run there, reports how they end, and ends them when it ends.

It runs in a Ray worker process, in the Python that Ray was started with on that node. It has a single thread, because Linux ends the
processes when the thread that started them ends; every call except `end` is short.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncmoe.launch.commands import Launch
from asyncmoe.launch.torchrun import free_port
from asyncmoe.process import Child

_LET_THROUGH = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class NodeFacts:
    """Facts about a node, from its actor.

    Attributes:
        address: the address at which all other nodes of the cluster reach this node.
        host: host name.
    """

    address: str
    host: str


@dataclass(frozen=True)
class End:
    """The end of a process: exit status or negative signal number, None if it runs, and the reason that the process gave."""

    status: int | None
    reason: str | None


class Node:
    """Ray actor that runs the processes of one bundle; the driver calls its methods."""

    def __init__(self) -> None:
        self._children: dict[str, Child] = {}

    def place(self) -> NodeFacts:
        """Return the node's address and host name."""
        import ray

        return NodeFacts(ray.util.get_node_ip_address(), socket.gethostname())

    def port(self) -> int:
        """Return a free TCP port."""
        return free_port("")

    def sees(self, directory: str, file: str) -> bool:
        """Change to `directory`, and return whether it and `file` are here."""
        try:
            os.chdir(directory)
        except OSError:
            return False
        return Path(file).exists()

    def start(self, launch: Launch) -> None:
        """Start a process."""
        # Ray sets OMP_NUM_THREADS to the bundle's CPUs. A value of the user's is in the launches' environment.
        os.environ.pop("OMP_NUM_THREADS", None)
        # Ray blocks SIGINT in its worker processes, and child processes inherit the signal mask.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, _LET_THROUGH)
        try:
            self._children[launch.name] = Child(launch.name, [sys.executable, *launch.arguments], launch.log, launch.environment)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ended(self) -> dict[str, End]:
        """Return the ends of the processes that have ended, by process name."""
        statuses = {name: child.returncode for name, child in self._children.items()}
        return {name: End(status, self._children[name].reason) for name, status in statuses.items() if status is not None}

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process."""
        self._children[name].signal(signal.Signals(number))

    def end(self, grace_s: float) -> None:
        """End all running processes, the last first, each killed after `grace_s`."""
        for child in reversed(self._children.values()):
            child.signal(signal.SIGTERM)
        for child in reversed(self._children.values()):
            child.end(grace_s)
