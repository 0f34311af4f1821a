"""The driver's side of the actor on a node, which presents the node's processes for supervision."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from signal import Signals
from typing import Any

from asyncmoe.launch.commands import Launch
from asyncmoe.launch.ray import cluster
from asyncmoe.launch.ray.cluster import Unreachable
from asyncmoe.launch.ray.node import End, NodeFacts
from asyncmoe.launch.ray.planning import Bundle
from asyncmoe.process import wait_until


class Post:
    """A node's actor, as the driver calls it.

    Args:
        ray: the connected `ray` module.
        actor: Ray's handle of the actor.
        heartbeat_timeout_s: seconds without an answer after which the node counts as lost.
    """

    def __init__(self, ray: Any, actor: Any, bundle: Bundle, place: NodeFacts, heartbeat_timeout_s: float) -> None:
        self.bundle, self.place = bundle, place
        self._actor, self._ray, self._timeout_s = actor, ray, heartbeat_timeout_s
        self._ended: Mapping[str, End] = {}
        self._asked: Any = None
        self._since = 0.0
        """Time of the first unanswered call, in time.monotonic's seconds; 0 if every call was answered."""

    @property
    def title(self) -> str:
        """Name of the node in messages."""
        return f"{self.bundle.title} on {self.place.address} ({self.place.host})"

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
        """Start a process on the node. The end of an earlier process with its name is forgotten.

        Raises:
            AsyncmoeError: see `call`.
        """
        self.call("start", launch)
        # An unanswered question of before would be answered with those ends, and its time was spent on ending them.
        self._ended, self._asked, self._since = {}, None, 0.0

    def _result(self, reference: Any, waited_s: float, wait_s: float = 0.0) -> Any:
        what = f"answer (cluster.heartbeat_timeout_s {self._timeout_s:g})"
        return cluster.result(self._ray, reference, self.title, what, waited_s, wait_s)


class Remote:
    """A process on a node, as an `asyncmoe.launch.run_processes.Process`."""

    def __init__(self, post: Post, launch: Launch) -> None:
        self._post, self._launch = post, launch
        self.name = f"{launch.name} on {post.place.address} ({post.place.host})"
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
