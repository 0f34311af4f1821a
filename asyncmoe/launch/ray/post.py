"""The driver's side of the actor on a node: what runs there, as processes to watch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from signal import Signals
from typing import Any

from asyncmoe.launch.ray import cluster
from asyncmoe.launch.ray.cluster import Unreachable
from asyncmoe.launch.ray.node import End, NodeFacts
from asyncmoe.launch.ray.planning import Bundle, Launch

_POLL_S = 0.1


class Post:
    """A node's actor.

    Args:
        ray: the module, connected.
        actor: Ray's handle.
        silence_s: an actor that does not answer for so long is lost.
    """

    def __init__(self, ray: Any, actor: Any, bundle: Bundle, place: NodeFacts, silence_s: float) -> None:
        self.bundle, self.place = bundle, place
        self._actor, self._ray, self._silence_s = actor, ray, silence_s
        self._ended: Mapping[str, End] = {}
        self._asked: Any = None
        self._since = 0.0
        """When the first question without an answer was asked, in time.monotonic's seconds; 0: all were answered."""

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{self.bundle.title} on {self.place.address} ({self.place.host})"

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the actor and wait for what it returns.

        Raises:
            AsyncmoeError: it failed, the node is lost, or there was no answer in time.
        """
        return self._result(self.tell(method, *arguments), 0.0, self._silence_s)

    def tell(self, method: str, *arguments: object) -> Any:
        """Call a method and wait for nothing; Ray's reference to what it will return."""
        return getattr(self._actor, method).remote(*arguments)

    def ended(self) -> Mapping[str, End]:
        """The processes there that have ended, as far as is known. A node that cannot be reached may come back.

        Raises:
            AsyncmoeError: the node is lost.
        """
        if self._asked is None:
            self._asked = self.tell("ended")
            self._since = self._since or time.monotonic()
        answered, _ = self._ray.wait([self._asked], timeout=0)
        silent = time.monotonic() - self._since
        if not answered and silent < self._silence_s:
            return self._ended
        asked, self._asked = self._asked, None
        try:
            self._ended, self._since = self._result(asked, silent), 0.0
        except Unreachable:
            if silent > self._silence_s:
                raise
        return self._ended

    def check(self) -> None:
        """It answers now.

        Raises:
            AsyncmoeError: the node is lost.
        """
        self.call("ended")

    def _result(self, reference: Any, waited_s: float, wait_s: float = 0.0) -> Any:
        what = f"answer (cluster.silence_s {self._silence_s:g})"
        return cluster.result(self._ray, reference, self.title, what, waited_s, wait_s)


class Remote:
    """A process on a node, to watch as `asyncmoe.launch.watch.Process`."""

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
        end = self._post.ended().get(self._launch.name)
        return None if end is None else end.status

    @property
    def reason(self) -> str | None:
        """What it gave as the reason for its end."""
        end = self._post.ended().get(self._launch.name)
        return None if end is None else end.reason

    def signal(self, number: Signals) -> None:
        """Send it a signal; nothing when it has ended."""
        self._post.tell("signal", self._launch.name, int(number))

    def wait(self, seconds: float) -> bool:
        """True when it ended within `seconds`."""
        until = time.monotonic() + seconds
        while self.returncode is None:
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True

    def why(self) -> str:
        """Which process on which node, and the reason it gave for ending, or else where to look."""
        return f"{self.name}: {self.reason or f'ended with status {self.returncode}; its log is {self.log}'}"
