"""One node of an engine over several machines, as `asyncmoe engine --node` runs it.

It reports to the controller, starts its server once all nodes have reported (`asyncmoe.engines.gathering`), and ends it when any other node
ends. Node 0 joins the run for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Sequence

import msgspec

from asyncmoe.async_tasks import first_of
from asyncmoe.config import Config
from asyncmoe.engines import backend
from asyncmoe.engines.engine import EngineProcess
from asyncmoe.engines.engine_stay import GRACE_S, ControllerLost, ServerLost, coming, controller, obey, stay, unless, watch
from asyncmoe.engines.nodes import MeetingPlace, NodePlace
from asyncmoe.errors import AsyncmoeError, EngineError, WaitTimeout
from asyncmoe.rpc import address
from asyncmoe.rpc.async_client import AsyncClient
from asyncmoe.rpc.messages import EngineJoin
from asyncmoe.rpc.node_messages import EngineNode, EngineNodeEnd, EngineNodes
from asyncmoe.rpc.peers import facts
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.telemetry import heartbeats

log = logging.getLogger(__name__)


async def serve_node(
    config: Config, name: str, index: int, node: int, memory: Sequence[str], seed: int, stop: asyncio.Event, *, again: bool
) -> None:
    """Serve one node of an engine until the run ends or `stop` is set.

    Args:
        seed: as for `asyncmoe.engines.backend.start`.
        again: whether this engine was in the run before.

    Raises:
        ServerLost: one of the engine's nodes was lost after the engine had joined; the run goes on without the engine.
        WaitTimeout: the controller is gone or did not come in time, or another node did not.
        AsyncmoeError: the engine did not start, or the run has failed.
    """
    rendezvous = await unless(stop, controller(config.run.dir, config.engines.start_timeout_s))
    if rendezvous is None:
        return
    over_network = address.several(config.cluster.network)
    host, key = address.reachable(config.cluster.network), secrets.token_urlsafe(32)
    with contextlib.ExitStack() as held:
        offered = None if node else held.enter_context(contextlib.closing(MeetingPlace(host if over_network else None)))
        seat = held.enter_context(contextlib.closing(Seat(config, rendezvous, name, node, "" if offered is None else offered.url)))
        with coming(again=again):
            met = await unless(stop, seat.meet())
            if met is None:
                if stop.is_set():
                    await seat.end("it was stopped")
                return
            place = NodePlace(node, met.meeting, rendezvous.derived_key(met.meeting))
            try:
                engine = backend.start(name, config, index, host=host, key=key, seed=seed, memory=memory, place=place)
            except AsyncmoeError as error:
                await seat.end(str(error))
                raise
        try:
            if node:
                await _hold(seat, engine, stop)
            else:
                await _lead(seat, engine, key, met, stop, again=again)
        finally:
            await engine.stop()


async def _hold(seat: Seat, engine: EngineProcess, stop: asyncio.Event) -> None:
    """Run the ranks of a node other than the first."""
    async with first_of(seat.follow(), watch(engine), stop.wait()) as (orders, health, _):
        if orders.done():
            obey(seat.title, orders.result())
        elif health.done():
            order = await seat.end(health.result())
            # Without an answer from this controller, the next one decides whether the run has failed.
            raise (EngineError if order.why and not order.again else ServerLost)(f"{seat.title} died: {health.result()}")
        else:
            log.info("%s leaves", seat.title)
            await seat.end("")


async def _lead(seat: Seat, engine: EngineProcess, key: str, met: EngineNodes, stop: asyncio.Event, *, again: bool) -> None:
    """Join the run for all nodes, and stay in it."""
    async with first_of(seat.follow(), engine.wait_ready(), stop.wait()) as (orders, starting, _):
        try:
            if orders.done():
                return obey(seat.title, orders.result())
            if not starting.done():
                await seat.end("it was stopped")
                return
            with coming(again=again):
                starting.result()
            # No process on a single machine shares memory with an engine on several machines.
            place, parallel = (engine.url, key, "+".join(sorted(set(met.hosts)))), (engine.tp, engine.ep)
            own, nodes = facts(engine.name), seat.config.engines.nodes
            request = EngineJoin(engine.name, *place, *parallel, seat.config.digest, own, nodes=nodes, met=met.meeting)
            await stay(seat.config, engine, seat.rendezvous, request, stop, again=again)
        except ControllerLost as error:
            raise ServerLost(str(error)) from error  # it joins the next controller anew, with all nodes
        except AsyncmoeError as error:
            if not orders.done():
                await seat.end(str(error))
            raise


class Seat:
    """A node's registration with the controller, among the nodes of its engine.

    Attributes:
        config: the run's configuration.
        title: the node's name in messages.
        rendezvous: the controller's rendezvous.

    Args:
        meeting: where the ranks can meet; empty except on node 0.
    """

    def __init__(self, config: Config, rendezvous: Rendezvous, name: str, node: int, meeting: str) -> None:
        self.title, self.rendezvous = f"{name} node {node}", rendezvous
        self.config = config
        self._limit_s = config.cluster.heartbeat_timeout_s
        self._client, self._controller = AsyncClient(rendezvous, rendezvous.controller), ""
        start, who = secrets.token_hex(8), socket.gethostname()
        place = (config.engines.nodes, start, address.host_id(), who, meeting, "")
        self._here = EngineNode(name, node, *place, self._limit_s / 3, config.digest, facts(self.title))

    async def meet(self) -> EngineNodes | None:
        """Wait for the other nodes; return where their ranks meet, or None if the run is over.

        Raises:
            ServerLost: the controller is gone, and another may replace it.
            WaitTimeout: a node did not come within `engines.start_timeout_s`, or the controller is gone.
            EngineError: the run has failed.
        """
        limit_s, begin = self.config.engines.start_timeout_s, time.monotonic()
        while True:
            heartbeats.beat("waits for the other nodes of its engine")
            reply = await self._ask()
            self._here = msgspec.structs.replace(self._here, facts=None, met=reply.meeting)  # the facts include an outdated clock reading
            if reply.finished:
                return None
            obey(self.title, reply)
            if reply.meeting:
                log.info("%s: all %d nodes have come", self.title, len(reply.hosts))
                return reply
            if (waited := time.monotonic() - begin) > limit_s:
                await self.end("it waited too long for the other nodes")
                absent = ", ".join(map(str, reply.missing))
                words = f"start asyncmoe engine --name {self._here.name} --node {absent} on its machine, or see its log"
                raise WaitTimeout(f"node {absent} of {self._here.name}", f"it has not arrived; {words}", waited)

    async def follow(self) -> EngineNodes:
        """Send heartbeats until the reply is an order, and return it. Raises as `meet` does if the controller is gone."""
        while True:
            heartbeats.beat(heartbeats.SERVES)
            if (reply := await self._ask()).is_order:
                return reply

    async def end(self, why: str) -> EngineNodes:
        """Report the node's end to the controller: `why` says how its server was lost; if it is empty, the engine leaves in order. Return
        the order for all nodes, once the controller has answered or is gone."""
        end = EngineNodeEnd(self._here.name, self._here.node, self._here.start, why)
        limit_s, reply = GRACE_S if why else self.config.rollout.request_timeout_s + GRACE_S, EngineNodes(finished=True)
        with contextlib.suppress(AsyncmoeError):
            told, _ = await self._client.ask(end, limit_s)
            reply = told if isinstance(told, EngineNodes) else reply
        return reply

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    async def _ask(self) -> EngineNodes:
        try:
            reply, _ = await self._client.ask(self._here, self._here.wait_s + self._limit_s)
        except WaitTimeout as error:
            if not self._controller:
                raise
            raise ServerLost(f"{self.title}: {error}") from error  # as in `_lead`
        assert isinstance(reply, EngineNodes)
        self._controller = reply.controller
        return reply
