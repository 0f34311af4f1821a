"""Engines, as the controller sees them: joining, heartbeats and leaving.

`asyncmoe engine` (`asyncmoe.engines.engine_agent`) starts and ends one engine, and sends the engine's messages here. An engine that has
joined receives requests from its first version on. An engine that leaves gets no new requests and finishes its current ones; an engine
without heartbeats is fenced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from asyncmoe.config import Config
from asyncmoe.engines.backend import connect
from asyncmoe.engines.gathering import Gatherings
from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool
from asyncmoe.engines.standstill import Standstill
from asyncmoe.errors import EngineError, ProtocolError, UserError, WaitTimeout
from asyncmoe.rpc.messages import Done, EngineAlive, EngineJoin, EngineJoined, EngineLeave, EngineOrder, EngineRequest
from asyncmoe.rpc.node_messages import EngineNode, EngineNodeEnd, EngineNodes
from asyncmoe.rpc.peers import check, check_digest, facts
from asyncmoe.telemetry import processes

log = logging.getLogger(__name__)
_POLL_S = 0.1
_RETURN_S = 10.0
"""Seconds for all engines to find the run's next controller, which goes on without slower ones."""
_REACH_S = 5.0
"""Seconds for a joining engine's server to answer: its machine may be busy with other starts, or its network bad for a moment."""
_FAREWELL_S = 3.0
"""Maximum seconds to wait for engines that have not fetched their last order yet."""
LEFT = "it has left"


class RemoteEngine:
    """An engine that has joined; an `asyncmoe.engines.engine.EngineHandle`.

    Attributes:
        gone: why it counts as dead; "" if it does not.

    Args:
        heartbeat_timeout_s: seconds without a heartbeat after which it counts as dead.
        gatherings: tracks its nodes, if it has several; they end with it.
    """

    def __init__(self, joined: EngineJoin, heartbeat_timeout_s: float, gatherings: Gatherings | None) -> None:
        self._gatherings, self._met = gatherings, joined.met
        self.name, self.tp, self.ep, self.host, self.pid = joined.name, joined.tp, joined.ep, joined.host, joined.pid
        self._started = processes.started(self.pid) if self.pid else None
        self.client = connect(joined.name, joined.url, joined.key)
        self.order: asyncio.Future[EngineOrder] = asyncio.get_running_loop().create_future()
        self.told = False
        self._timeout_s, self.gone = heartbeat_timeout_s, ""
        self._heard, self._standstill = time.monotonic(), Standstill()

    @property
    def died(self) -> str | None:
        """Why the engine counts as dead, or None."""
        self._heard += self._standstill.look()  # the pool asks twice a second; heartbeats that came meanwhile are still to be read
        silent = time.monotonic() - self._heard
        if not self.gone and silent > self._timeout_s:
            self.gone = f"no heartbeat for {silent:.0f} s (cluster.heartbeat_timeout_s {self._timeout_s:g})"
        if not self.gone and self._gatherings is not None and not self.order.done():
            self.gone = self._gatherings.lost(self.name, self._met)
        return self.gone or None

    def kill(self, why: str = "") -> None:
        """Order the engine to end; it polls for orders continuously. If its memory is needed, kill its server at once, as the process that
        gets the order may be stopped."""
        self.tell(EngineOrder(why=self.gone or f"it is fenced: {why}", again=True))
        if self._started is not None and processes.started(self.pid) == self._started:
            with suppress(ProcessLookupError):  # it ended just now
                os.killpg(self.pid, signal.SIGKILL)

    def tell(self, order: EngineOrder) -> None:
        """Set the engine's last order; later orders are ignored."""
        if not self.order.done():
            self.order.set_result(order)
            if self._gatherings is not None:
                self._gatherings.end(self.name, self._met, order)

    async def ask(self, wait_s: float) -> EngineOrder:
        """Record a heartbeat; wait at most `wait_s` for the last order, and return it or an empty order."""
        self._heard = time.monotonic()
        await asyncio.wait([self.order], timeout=min(wait_s, self._timeout_s / 2))
        self._heard = time.monotonic()
        self.told = self.order.done()
        return self.order.result() if self.told else EngineOrder()


class Membership:
    """Handles the requests of engines.

    Args:
        pool: the pool that engines join.
        updating: returns True if an open weight update goes to the engine.
        controller: name of this controller to the engines.
        returned: lets an engine that served the named controller continue with its weights; returns why it cannot, or an empty string.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        updating: Callable[[Member], bool],
        controller: str,
        returned: Callable[[Member, str], Awaitable[str]],
    ) -> None:
        self._config, self._pool, self._updating = config, pool, updating
        self._controller, self._returned = controller, returned
        self._ended: EngineOrder | None = None
        self._draining: dict[Member, asyncio.Task[None]] = {}
        self._left: set[str] = set()
        self._returning = 0
        self._gatherings = Gatherings(config.cluster.heartbeat_timeout_s, controller)

    async def handle(self, request: EngineRequest) -> EngineJoined | EngineOrder | EngineNodes | Done:
        """Answer one request.

        Raises:
            ConfigError: the engine has a different configuration.
            UserError: the engine's name is taken, or its package versions or clock differ from the controller's.
            EngineError: the controller cannot reach the engine, or the engine must start again before it can join.
            ProtocolError: the engine has not joined.
        """
        match request:
            case EngineJoin():
                await self._join(request)
                return EngineJoined(self._controller)
            case EngineAlive() | EngineLeave() if request.name in self._left:  # another node has reported that it left
                return EngineOrder(finished=True) if isinstance(request, EngineAlive) else Done()
            case EngineAlive():
                return await self._joined(request.name)[1].ask(request.wait_s)
            case EngineLeave():
                await self._leave(request.name, request.why)
                return Done()
            case EngineNode():
                _check(self._config, request)
                return await self._gatherings.ask(request)
            case EngineNodeEnd():
                await self._node_ended(request)
                return self._gatherings.order(request.name, request.start)

    async def wait_returned(self, most_s: float) -> None:
        """Wait until `engines.count` engines of the previous controller have come, at most `most_s`; if one has come, only `_RETURN_S`."""
        begin = time.monotonic()
        while self._returning or len(self._pool.present) < self._config.engines.count:
            if (waited := time.monotonic() - begin) > most_s or (self._pool.present and waited > _RETURN_S and not self._returning):
                return
            await asyncio.sleep(_POLL_S)

    async def wait_joined(self, count: int, timeout_s: float) -> None:
        """Return when `count` engines have joined.

        Raises:
            WaitTimeout: names the engines that have joined.
        """
        until = time.monotonic() + timeout_s
        while len(self._pool.present) < count:
            if time.monotonic() > until:
                here = ", ".join(member.engine.name for member in self._pool.present) or "none"
                what = (
                    f"{count - len(self._pool.present)} of {count} have not joined; joined: {here}; start asyncmoe engine, or see its log"
                )
                raise WaitTimeout("engines", what, timeout_s)
            await asyncio.sleep(_POLL_S)

    async def end(self, order: EngineOrder) -> None:
        """Send all engines their last order, and wait briefly for those that are not polling at the moment."""
        self._ended = order
        self._gatherings.end_all(order)
        remote = [member.engine for member in self._pool.members if isinstance(member.engine, RemoteEngine)]
        for engine in remote:
            engine.tell(order)
        until = time.monotonic() + _FAREWELL_S
        while not all(engine.told or engine.died for engine in remote) and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
        await asyncio.gather(*(engine.client.close() for engine in remote))

    async def _join(self, request: EngineJoin) -> None:
        _check(self._config, request)
        before = [member for member in self._pool.members if member.engine.name == request.name]
        for member in before:
            if member.fenced is None and (request.served or not await member.engine.client.ready()):
                self._pool.fence(member, "it has rejoined")
            elif member.fenced is None:
                raise UserError(f"engine {request.name}", got="a name already taken", expected="a unique name", hint="set another --name")
        gatherings = self._gatherings if request.nodes > 1 else None
        if gatherings is not None and (why := gatherings.join(request)):
            raise EngineError(why)
        engine = RemoteEngine(request, self._config.cluster.heartbeat_timeout_s, gatherings)
        until = time.monotonic() + _REACH_S
        while not (there := await engine.client.ready()) and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
        if not there:
            await engine.client.close()
            why = f"{request.name}: the controller cannot reach it at {request.url}; see cluster.network, ASYNCMOE_HOST and the firewall"
            raise EngineError(why)
        for member in before:  # only now, because the run would end if the pool had no member
            if member in self._pool.members:
                self._pool.remove(member)
        member = self._pool.join(engine)
        self._left.discard(request.name)
        self._gatherings.joined(request.name)
        if request.served:
            self._returning += 1  # it is in the pool, but no update may begin before it has ended the one of its last controller
            try:
                why = await self._returned(member, request.served)
            finally:
                self._returning -= 1
            if why:
                self._pool.fence(member, why)
                raise EngineError(why)
            log.info("%s has returned from %s", request.name, request.url)
            return
        if self._ended is not None:
            engine.tell(self._ended)
        log.info("%s has joined from %s; it serves from the next version on", request.name, request.url)

    async def _leave(self, name: str, why: str) -> None:
        member, remote = self._joined(name)
        if why:
            remote.gone = why
            self._pool.fence(member, why)
            return
        # All nodes of an engine may ask to leave at once.
        if (draining := self._draining.get(member)) is None:
            draining = self._draining[member] = asyncio.create_task(self._drain(member, remote))
            draining.add_done_callback(lambda _: self._draining.pop(member))
        await asyncio.shield(draining)

    async def _drain(self, member: Member, remote: RemoteEngine) -> None:
        member.leaving = True
        if (workers := self._pool.elsewhere) is not None:
            workers.tell()
        until = time.monotonic() + self._config.rollout.request_timeout_s
        used = await self._used(member)
        while (used or self._updating(member)) and member.fenced is None and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
            used = await self._used(member)
        member.fenced = member.fenced or LEFT
        if not used and member in self._pool.members:
            self._pool.remove(member)
            self._left.add(member.engine.name)
            await remote.client.close()
        remote.tell(EngineOrder(finished=True))
        log.info("%s has left", member.engine.name)

    async def _used(self, member: Member) -> int:
        """Return the number of requests at a leaving engine; above 0 while a rollout worker may not know yet that it leaves."""
        late = 0 if self._pool.elsewhere is None else await self._pool.elsewhere.late()
        return member.in_flight + member.elsewhere + late

    async def _node_ended(self, request: EngineNodeEnd) -> None:
        """End the engine whose node ends: in order if the node was asked to leave, else at once."""
        there = any(one.engine.name == request.name for one in self._pool.present)
        if there and not request.why and self._gatherings.has(request.name, request.start):
            await self._leave(request.name, "")
        elif self._gatherings.end_start(request.name, request.start, request.why or "it was stopped"):
            self._pool.fence_dead()

    def _joined(self, name: str) -> tuple[Member, RemoteEngine]:
        for member in self._pool.members:
            if member.engine.name == name and isinstance(member.engine, RemoteEngine):
                return member, member.engine
        raise ProtocolError(f"{name}: no engine of that name has joined this controller")


def _check(config: Config, request: EngineJoin | EngineNode) -> None:
    check_digest(request.name, request.config_digest, config.digest)
    check(facts("controller"), request.facts)
