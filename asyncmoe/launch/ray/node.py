"""The processes of a run on a node: the actor there (`Node`), its counterpart in the driver (`Post`), and the driver's view of a process
(`Remote`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from asyncmoe.launch.commands import Launch
from asyncmoe.launch.ray import cluster
from asyncmoe.launch.ray.cluster import Unreachable
from asyncmoe.launch.ray.planning import Bundle
from asyncmoe.launch.torchrun import free_port
from asyncmoe.process import Child, wait_until

_LET_THROUGH = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class End:
    """The end of a process: exit status or negative signal number (None while it runs), and the reason that the process gave."""

    status: int | None
    reason: str | None


class Node:
    """Ray actor that starts the processes of one bundle, reports how they end, and ends them when it ends; the driver calls its methods.

    It runs in a Ray worker process, in the Python that Ray was started with on that node. It has a single thread, because Linux ends the
    processes when the thread that started them ends; every call except `end` is short.
    """

    def __init__(self) -> None:
        self._children: dict[str, Child] = {}

    def place(self) -> tuple[str, str]:
        """Return the address at which all other nodes of the cluster reach this node, and its host name."""
        import ray

        return ray.util.get_node_ip_address(), socket.gethostname()

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
        # Ray sets OMP_NUM_THREADS to the bundle's CPUs. A user's value is in the launches' environment.
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
        """End all running processes, the newest first; kill each after `grace_s`."""
        for child in reversed(self._children.values()):
            child.signal(signal.SIGTERM)
        for child in reversed(self._children.values()):
            child.end(grace_s)


class Post:
    """A node's actor, as the driver calls it.

    Args:
        ray: the connected `ray` module.
        actor: Ray's handle of the actor.
        address, host: as reported by the actor.
        heartbeat_timeout_s: seconds without an answer after which the node counts as lost.
    """

    def __init__(self, ray: Any, actor: Any, bundle: Bundle, address: str, host: str, heartbeat_timeout_s: float) -> None:
        self.bundle, self.address, self.place = bundle, address, f"{address} ({host})"
        self._actor, self._ray, self._timeout_s = actor, ray, heartbeat_timeout_s
        self._ended: Mapping[str, End] = {}
        self._asked: Any = None
        self._since = 0.0
        """Time of the first unanswered call, in time.monotonic's seconds; 0 if every call was answered."""

    @property
    def title(self) -> str:
        """Name of the node in messages."""
        return f"{self.bundle.title} on {self.place}"

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the actor and return its result.

        Raises:
            AsyncmoeError: the call failed, the node is lost, or there was no answer in time.
        """
        return self._result(self.tell(method, *arguments), 0.0, self._timeout_s)

    def tell(self, method: str, *arguments: object) -> Any:
        """Call a method without waiting, and return Ray's reference to its result."""
        return getattr(self._actor, method).remote(*arguments)

    def ended(self) -> Mapping[str, End]:
        """Return the last known ends of the node's processes. An unreachable node counts as lost only after `heartbeat_timeout_s`.

        Raises:
            AsyncmoeError: the node is lost.
        """
        if self._asked is None:
            self._asked = self.tell("ended")
            self._since = self._since or time.monotonic()
        answered, _ = self._ray.wait([self._asked], timeout=0)
        silent = time.monotonic() - self._since
        if not answered and silent < self._timeout_s:
            return self._ended
        asked, self._asked = self._asked, None
        try:
            self._ended, self._since = self._result(asked, silent), 0.0
        except Unreachable:
            if silent > self._timeout_s:
                raise
        return self._ended

    def start(self, launch: Launch) -> None:
        """Start a process on the node, forgetting the end of an earlier one of the same name.

        Raises:
            AsyncmoeError: see `call`.
        """
        self.call("start", launch)
        # A pending query would report the earlier ends, and its waiting time includes ending those processes.
        self._ended, self._asked, self._since = {}, None, 0.0

    def _result(self, reference: Any, waited_s: float, wait_s: float = 0.0) -> Any:
        what = f"answer (cluster.heartbeat_timeout_s {self._timeout_s:g})"
        return cluster.result(self._ray, reference, self.title, what, waited_s, wait_s)


class Remote:
    """A process on a node, as an `asyncmoe.launch.run_processes.Process`."""

    def __init__(self, post: Post, launch: Launch) -> None:
        self._post, self._launch = post, launch
        self.name = f"{launch.name} on {post.place}"
        self.log: Path = launch.log

    @property
    def returncode(self) -> int | None:
        """Exit status, negative signal number, or None while it runs.

        Raises:
            AsyncmoeError: the node is lost.
        """
        return self._end.status

    @property
    def reason(self) -> str | None:
        """The reason that the process gave for its end; None if it gave none."""
        return self._end.reason

    @property
    def _end(self) -> End:
        return self._post.ended().get(self._launch.name, End(None, None))

    def signal(self, number: Signals) -> None:
        """Send the process a signal; do nothing if it has ended."""
        self._post.tell("signal", self._launch.name, int(number))

    def wait(self, seconds: float) -> bool:
        """Wait for the process; true if it ended within `seconds`."""
        return wait_until(lambda: self.returncode is not None, seconds)

    def why(self) -> str:
        """Process and node, with the reason that the process gave for its end, or its status and log."""
        return f"{self.name}: {self.reason or f'ended with status {self.returncode}; its log is {self.log}'}"
