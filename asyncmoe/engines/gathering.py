"""The nodes of engines over several machines, as the controller sees them: they arrive, meet, and end together.

A node polls continuously (`asyncmoe.rpc.node_messages.EngineNode`). Once all nodes of an engine have arrived, each learns where their ranks
meet and starts its server; node 0 then joins like any engine (`membership.py`). If one node ends, or is silent for
`cluster.heartbeat_timeout_s`, all end: the others are ordered to end their servers, and arrive anew if the engine had joined.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from asyncmoe.engines.standstill import Standstill
from asyncmoe.errors import UserError
from asyncmoe.rpc.messages import EngineJoin, EngineOrder
from asyncmoe.rpc.node_messages import EngineNode, EngineNodes

log = logging.getLogger(__name__)
_POLL_S = 0.1
_MOST_ENDED = 1024
"""Number of ended nodes to remember, because they may still wait for an answer."""


@dataclass(frozen=True)
class NodeSeat:
    """A node that has arrived.

    Attributes:
        start, host, who: as in `EngineNode`.
        heard: monotonic time of its last request.
    """

    start: str
    host: str
    who: str
    heard: float


@dataclass(frozen=True)
class NodeGathering:
    """The nodes of an engine, from the first arrival until all have ended.

    Attributes:
        name: the engine's name.
        nodes: number of nodes.
        seats: arrived nodes, by number.
        meeting: where the ranks meet; empty until node 0 has sent it.
        joined: whether the engine has joined the run.
    """

    name: str
    nodes: int
    seats: Mapping[int, NodeSeat] = field(default_factory=dict)
    meeting: str = ""
    joined: bool = False

    @property
    def starts(self) -> frozenset[str]:
        """The `start` of each node that has arrived."""
        return frozenset(seat.start for seat in self.seats.values())

    @property
    def missing(self) -> tuple[int, ...]:
        """Nodes that have not arrived."""
        return tuple(node for node in range(self.nodes) if node not in self.seats)

    @property
    def has_met(self) -> bool:
        """Whether every node may start its server."""
        return not self.missing


def arrive(found: NodeGathering | None, request: EngineNode, now: float, limit_s: float) -> NodeGathering:
    """Return an engine's nodes, updated with a request from one of them.

    Args:
        found: the engine's nodes so far; None: none has arrived.
        limit_s: seconds of silence after which a node's seat is free, unless all have met.

    Raises:
        UserError: the node's seat is taken, or the nodes disagree on their number.
    """
    name, node = request.name, request.node
    if node >= request.nodes:
        raise UserError(f"node of engine {name}", got=node, expected=f"less than engines.nodes = {request.nodes}")
    found = None if found is None else staying(found, now, limit_s)
    if found is None or not found.seats:
        found = NodeGathering(name, request.nodes)
    if request.nodes != found.nodes:
        raise UserError(f"engines.nodes of {name} on {request.who}", got=request.nodes, expected=f"{found.nodes}, as on its first node")
    if (before := found.seats.get(node)) is not None and before.start != request.start:
        got, expected = f"a second one on {request.who}", f"only the one on {before.who}"
        silence = max(0.0, limit_s - (now - before.heard))
        hint = f"set another --node or --name, or start again in {silence:.0f} s if the first one has ended"
        raise UserError(f"node {node} of engine {name}", got=got, expected=expected, hint=hint)
    seat = NodeSeat(request.start, request.host, request.who, now)
    meeting = request.meeting if node == 0 and not found.has_met else found.meeting
    return replace(found, seats={**found.seats, node: seat}, meeting=meeting)


def staying(found: NodeGathering, now: float, limit_s: float) -> NodeGathering:
    """Return an engine's nodes without those that fell silent before all had arrived."""
    if found.has_met:
        return found
    return replace(found, seats={node: seat for node, seat in found.seats.items() if now - seat.heard <= limit_s})


def silent(found: NodeGathering, now: float, limit_s: float) -> str:
    """Return why the engine is lost if a node fell silent after all had met, else an empty string.

    Node 0 of an engine that has joined is watched as an engine (`membership.RemoteEngine`).
    """
    for node, seat in sorted(found.seats.items() if found.has_met else ()):
        if not (node == 0 and found.joined) and now - seat.heard > limit_s:
            return f"node {node} on {seat.who}: no heartbeat for {now - seat.heard:.0f} s (cluster.heartbeat_timeout_s {limit_s:g})"
    return ""


class Gatherings:
    """The nodes of all engines over several machines.

    Args:
        limit_s: `cluster.heartbeat_timeout_s`.
        controller: name of this controller to the engines.
    """

    def __init__(self, limit_s: float, controller: str) -> None:
        self._limit_s, self._controller = limit_s, controller
        self._now: dict[str, NodeGathering] = {}
        self._over: dict[str, tuple[frozenset[str], EngineOrder]] = {}
        """By engine: the `start` of each of its nodes that were last ordered to end, and that order."""
        self._last: EngineOrder | None = None
        self._ended: deque[str] = deque(maxlen=_MOST_ENDED)
        self._standstill = Standstill()

    async def ask(self, request: EngineNode) -> EngineNodes:
        """Record a node's heartbeat; reply at once if there is news for it, else after its `wait_s`.

        Raises:
            UserError: as `arrive`.
        """
        until = time.monotonic() + min(request.wait_s, self._limit_s / 2)
        self._hear(request)
        while True:
            self._watch(request.name)
            reply = self._reply(request)
            if reply.is_order or reply.meeting != request.met or time.monotonic() >= until:
                return reply
            await asyncio.sleep(_POLL_S)

    def join(self, request: EngineJoin) -> str:
        """Return why an engine of several nodes cannot join, or an empty string."""
        found = self._now.get(request.name)
        if found is None or not found.has_met or found.meeting != request.met:
            return f"{request.name}: one of its nodes was lost before it could join"
        return ""

    def joined(self, name: str) -> None:
        """Note that an engine has joined."""
        if (found := self._now.get(name)) is not None:
            self._now[name] = replace(found, joined=True)

    def has(self, name: str, start: str) -> bool:
        """Return whether the node with this `start` is among the engine's current nodes."""
        return (found := self._now.get(name)) is not None and start in found.starts

    def lost(self, name: str, met: str) -> str:
        """Return why an engine whose ranks met at `met` is lost with one of its nodes, or an empty string. Call at least twice a second."""
        self._look()
        if (found := self._now.get(name)) is None or found.meeting != met:
            return self._over[name][1].why if name in self._over else "one of its nodes is lost"
        return silent(found, time.monotonic(), self._limit_s)

    def end(self, name: str, met: str, order: EngineOrder) -> None:
        """Order all nodes of an engine whose ranks met at `met` to end; later orders are ignored."""
        if (found := self._now.get(name)) is not None and found.meeting == met:
            self._over[name] = self._now.pop(name).starts, order
            log.info("the %d nodes of %s end: %s", found.nodes, name, order.why or "it is over")

    def end_start(self, name: str, start: str, why: str) -> bool:
        """Handle the end of the node with this `start`: if all nodes have met, all end. Return whether the node was known."""
        found = self._now.get(name)
        node = next((number for number, seat in found.seats.items() if seat.start == start), None) if found is not None else None
        if found is None or node is None:
            return False
        self._ended.append(start)
        if not found.has_met:
            self._now[name] = replace(found, seats={number: seat for number, seat in found.seats.items() if number != node})
            return True
        self.end(name, found.meeting, EngineOrder(why=f"node {node} on {found.seats[node].who}: {why}", again=found.joined))
        return True

    def order(self, name: str, start: str) -> EngineNodes:
        """Return the order to end for all nodes of an engine, after one has reported its end."""
        return _ending(self._told(name, start) or EngineOrder(finished=True))

    def end_all(self, order: EngineOrder) -> None:
        """Order the nodes of all engines to end, including any that arrive later."""
        self._last = order

    def _hear(self, request: EngineNode) -> None:
        if self._last is not None or request.start in self._ended or self._told(request.name, request.start) is not None:
            return
        found = self._now.get(request.name)
        if not request.met or (found is not None and found.meeting == request.met):  # else its engine was lost
            came = self._now[request.name] = arrive(found, request, time.monotonic(), self._limit_s)
            if found is None or request.start not in found.starts:
                log.info("node %d of %s has come from %s; missing: %s", request.node, request.name, request.who, came.missing or "none")

    def _watch(self, name: str) -> None:
        """End the nodes of an engine if one of them is silent."""
        self._look()
        if (found := self._now.get(name)) is not None and (why := silent(found, time.monotonic(), self._limit_s)):
            self.end(name, found.meeting, EngineOrder(why=why, again=found.joined))

    def _reply(self, request: EngineNode) -> EngineNodes:
        if (order := self._last or self._told(request.name, request.start)) is not None:
            return _ending(order)
        found = self._now.get(request.name)
        if found is None or request.start in self._ended or (request.met and found.meeting != request.met):
            return EngineNodes(why="its engine was lost in the meantime", again=True)
        meeting = found.meeting if found.has_met else ""
        hosts = tuple(found.seats[node].host for node in sorted(found.seats)) if meeting else ()
        return EngineNodes(meeting, hosts, found.missing, self._controller)

    def _told(self, name: str, start: str) -> EngineOrder | None:
        """Return the order to end that was given to the node with this `start`; None: it goes on."""
        starts, order = self._over.get(name, (frozenset[str](), None))
        return order if start in starts else None

    def _look(self) -> None:
        """Extend the limits if this process stood still: what nodes sent meanwhile is yet to be read."""
        if gap := self._standstill.look():
            for name, found in self._now.items():
                later = {node: replace(seat, heard=seat.heard + gap) for node, seat in found.seats.items()}
                self._now[name] = replace(found, seats=later)


def _ending(order: EngineOrder) -> EngineNodes:
    return EngineNodes(finished=order.finished, why=order.why, again=order.again)
