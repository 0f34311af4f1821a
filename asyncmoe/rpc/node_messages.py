"""Messages between the controller and the nodes of an engine over several machines (`asyncmoe.engines.gathering`).

Every node polls: it learns where all ranks meet once all nodes have arrived, and later how it must end.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from asyncmoe.rpc.base import Count, Message, Wait
from asyncmoe.rpc.peers import Facts

MAX_NODES = 4096


class EngineNode(Message, frozen=True):
    """Heartbeat of an engine's node. Answered once there is news for the node, or after `wait_s`."""

    name: str
    """The engine's name."""
    node: Count
    nodes: Annotated[int, msgspec.Meta(ge=2, le=MAX_NODES)]
    start: str
    """Random ID of this start of the node."""
    host: str
    """`asyncmoe.rpc.address.host_id` of its machine."""
    who: str
    """The machine's name in messages."""
    meeting: str
    """On node 0, where the ranks can meet (`asyncmoe.engines.nodes.NodePlace.meeting`); else empty."""
    met: str
    """Where the ranks of its server meet; empty: no server started."""
    wait_s: Wait
    config_digest: str
    facts: Facts | None = None


class EngineNodeEnd(Message, frozen=True):
    """A node ends. Without `why`, the whole engine leaves in order, and the reply comes once it is drained; with it, the engine is lost."""

    name: str
    node: Count
    start: str
    why: str = ""


class EngineNodes(Message, frozen=True):
    """Reply to `EngineNode`: the state of the engine's nodes, or how they end, with the fields of `asyncmoe.rpc.messages.EngineOrder`.

    The latter is also the reply to `EngineNodeEnd`.
    """

    meeting: str = ""
    """Where the ranks meet; empty: some nodes are missing."""
    hosts: tuple[str, ...] = ()
    """`EngineNode.host` of every node, once they meet."""
    missing: tuple[int, ...] = ()
    """Nodes that have not arrived."""
    controller: str = ""
    """Name of this controller; empty if no other can replace it."""
    finished: bool = False
    why: str = ""
    again: bool = False

    @property
    def is_order(self) -> bool:
        """Whether the node must end."""
        return self.finished or bool(self.why)
