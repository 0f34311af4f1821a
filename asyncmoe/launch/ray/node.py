"""The actor on a node: starts the processes of a run there, says how they end, and ends them when it ends.

It runs in a worker process of Ray, in the Python that Ray was started with on that node. Its calls take moments, all but `end`, and it
has one thread: Linux ends the processes when the thread that started them ends.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncmoe.launch.ray.planning import Launch
from asyncmoe.launch.torchrun import free_port
from asyncmoe.process import Child

_LET_THROUGH = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class NodeFacts:
    """A node as its actor finds it.

    Attributes:
        address: at which all other nodes of the cluster reach it.
        host: its name.
        port: one that nobody has.
    """

    address: str
    host: str
    port: int


@dataclass(frozen=True)
class End:
    """How a process ended: exit status or negative signal number, and the reason it gave."""

    status: int
    reason: str | None


class Node:
    """Processes of one bundle. An actor: the driver calls its methods through Ray."""

    def __init__(self) -> None:
        self._children: dict[str, Child] = {}

    def place(self) -> NodeFacts:
        """Where it is."""
        import ray

        return NodeFacts(ray.util.get_node_ip_address(), socket.gethostname(), free_port(""))

    def seen(self, directory: str, file: str) -> str:
        """SHA-256 in hex of a file; empty where this node does not have it, or not the directory to work in. Works there from now on."""
        try:
            os.chdir(directory)
            return hashlib.sha256(Path(file).read_bytes()).hexdigest()
        except OSError:
            return ""

    def start(self, launches: Sequence[Launch]) -> None:
        """Start processes, in order."""
        # Ray has set it to the bundle's CPUs. Where the user has, it is in the launches.
        os.environ.pop("OMP_NUM_THREADS", None)
        # Ray blocks SIGINT in all that it starts, and what is started from there inherits that.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, _LET_THROUGH)
        try:
            for launch in launches:
                self._children[launch.name] = Child(launch.name, [sys.executable, *launch.arguments], launch.log, launch.environment)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ended(self) -> dict[str, End]:
        """The processes that have ended."""
        statuses = {name: child.returncode for name, child in self._children.items()}
        return {name: End(status, self._children[name].reason) for name, status in statuses.items() if status is not None}

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process."""
        self._children[name].signal(signal.Signals(number))

    def end(self, grace_s: float) -> None:
        """End all that runs, the last first; each has `grace_s` for it."""
        for child in reversed(self._children.values()):
            child.signal(signal.SIGTERM)
        for child in reversed(self._children.values()):
            child.end(grace_s)
