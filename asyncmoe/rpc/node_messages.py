"""Messages between the controller and the nodes of an engine over several machines (`asyncmoe.engines.gathering`).

Every node says again and again that it is there, and hears where the ranks of all meet once all have come, and later how it is to end.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from asyncmoe.rpc.base import Count, Message, Wait
from asyncmoe.rpc.peers import Facts

MAX_NODES = 4096


class EngineNode(Message, frozen=True):
    """A node of an engine is there. Answered when it is to do something else than before, or after `wait_s`."""

    name: str
    """Of the engine."""
    node: Count
    nodes: Annotated[int, msgspec.Meta(ge=2, le=MAX_NODES)]
    start: str
    """Random, of this start of the node."""
    host: str
    """`asyncmoe.rpc.address.host_id` of its machine."""
    who: str
    """Name of its machine in messages."""
    meeting: str
    """Of node 0: where the ranks can meet (`asyncmoe.engines.nodes.NodePlace.meeting`); else empty."""
    met: str
    """Where the ranks of its server meet; empty: it has started none."""
    wait_s: Wait
    config_digest: str
    facts: Facts | None = None


class EngineNodeEnd(Message, frozen=True):
    """A node ends: without `why` the whole engine leaves in order, which is answered once it is drained; with it, the engine is lost."""

    name: str
    node: Count
    start: str
    why: str = ""


class EngineNodes(Message, frozen=True):
    """Reply to `EngineNode`: the state of the engine's nodes, or how they end, as an `asyncmoe.rpc.messages.EngineOrder` says.

    The latter is also the reply to `EngineNodeEnd`.
    """

    meeting: str = ""
    """Where the ranks meet; empty: some nodes are missing."""
    hosts: tuple[str, ...] = ()
    """`EngineNode.host` of every node, once they meet."""
    missing: tuple[int, ...] = ()
    """Nodes that have not come."""
    controller: str = ""
    """Name of this controller; empty if no other can take its place."""
    finished: bool = False
    why: str = ""
    again: bool = False

    @property
    def is_order(self) -> bool:
        """Whether the node is to end."""
        return self.finished or bool(self.why)
