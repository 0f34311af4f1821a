"""An engine's side of its membership in a run (`asyncmoe engine`): it joins, sends heartbeats, and leaves or is ordered to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncmoe.async_tasks import first_of
from asyncmoe.config import Config
from asyncmoe.engines.engine import EngineProcess
from asyncmoe.errors import AsyncmoeError, EngineError, ProtocolError, WaitTimeout
from asyncmoe.rpc import keys
from asyncmoe.rpc.async_client import AsyncClient
from asyncmoe.rpc.messages import EngineAlive, EngineJoin, EngineJoined, EngineLeave, EngineOrder, EngineStarts, TurnTaken
from asyncmoe.rpc.node_messages import EngineNodes
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.telemetry import heartbeats

log = logging.getLogger(__name__)
T = TypeVar("T")
_POLL_S = 0.5
_PARENT = os.getppid()
GRACE_S = 10.0
"""Seconds to wait for a reply beyond the time its request may take."""


class ServerLost(EngineError):
    """The server died or was fenced, and the run goes on without it."""

    exit_code = 4


class RunFailed(EngineError):
    """The controller has ended the engine, because the run has failed."""


class ControllerLost(AsyncmoeError):
    """The controller is gone; the server goes on. `controller`: its name, or empty if it was gone before the server joined."""

    def __init__(self, why: str, controller: str) -> None:
        super().__init__(why)
        self.controller = controller


@contextlib.contextmanager
def coming(*, again: bool) -> Iterator[None]:
    """Start an engine, or let it join, within the block. If the run had this engine before, a failure loses only the engine, not the run.

    Raises:
        ServerLost: with `again`, on any error, unless the controller is gone or has ended the engine.
    """
    try:
        yield
    except AsyncmoeError as error:
        if not again or isinstance(error, ServerLost | ControllerLost | RunFailed):
            raise
        raise ServerLost(str(error)) from error


async def stay(
    config: Config, engine: EngineProcess, rendezvous: Rendezvous, request: EngineJoin, stop: asyncio.Event, *, again: bool
) -> None:
    """Stay in the run to its end, under one controller after another.

    Args:
        again: whether this engine was in the run before.

    Raises:
        ServerLost: the server is lost, or must start again to serve another controller.
        RunFailed: the run has failed.
        ControllerLost: the controller is lost, and the engine spans several nodes.
        WaitTimeout: the controller is lost, and none replaced it within `engines.orphan_s`.
    """
    lost: ControllerLost | None = None
    now = asyncio.get_running_loop().time
    while True:
        try:
            return await _stay_with(config, engine, rendezvous, request, stop, again=again or lost is not None)
        except ControllerLost as error:
            if request.nodes > 1:
                raise
            if lost is None or error.controller:  # else the next controller was lost before it answered
                lost, until = error, now() + config.engines.orphan_s
            log.warning("%s; waiting for the next controller", error)
        nobody = WaitTimeout("the next controller", str(lost), config.engines.orphan_s)
        if (left := until - now()) < 0:  # a hanging controller is found again and again
            raise nobody
        try:
            successor = await unless(stop, controller(config.run.dir, left, engine))
        except WaitTimeout:
            raise nobody from None
        if successor is None:
            return
        # The facts include a clock reading, now outdated.
        rendezvous, request = successor, msgspec.structs.replace(request, facts=None, served=lost.controller)


async def controller(run_dir: Path, wait_s: float, engine: EngineProcess | None = None) -> Rendezvous:
    """Wait for a controller, which may start after this process, and return its rendezvous.

    Args:
        engine: a server that keeps serving meanwhile.

    Raises:
        WaitTimeout: none came in time.
        ServerLost: the server died meanwhile.
    """
    now = asyncio.get_running_loop().time
    began = now()
    while True:
        heartbeats.beat("waiting for a controller")
        try:
            return await asyncio.to_thread(keys.read, run_dir, 0.0)
        except WaitTimeout as error:
            waited = now() - began
            if waited > wait_s:
                raise WaitTimeout(error.whom, error.what, waited) from None
        if engine is not None and engine.died is not None:
            raise ServerLost(f"{engine.name} died: {engine.died}")
        await asyncio.sleep(_POLL_S)


async def may_start(config: Config, name: str) -> bool:
    """Wait until an engine that uses the trainer's devices in turn may start; the trainer has limits of its own. Raises WaitTimeout: the
    controller does not answer."""
    rendezvous = await controller(config.run.dir, config.engines.start_timeout_s)
    with contextlib.closing(AsyncClient(rendezvous, rendezvous.controller)) as client:
        while not isinstance((await client.ask(EngineStarts(name, GRACE_S), 2 * GRACE_S))[0], TurnTaken):
            heartbeats.beat("waiting for its turn")
    return True


def obey(name: str, order: EngineOrder | EngineNodes) -> None:
    """Return normally if the run is over.

    Raises:
        ServerLost: the engine is lost, but not the run.
        RunFailed: the run has failed, or the engine did not start.
    """
    if order.why:
        raise (ServerLost if order.again else RunFailed)(f"{name} was ended by the controller: {order.why}")


async def watch(engine: EngineProcess) -> str:
    """Wait for a server to end, and return the reason."""
    while (why := engine.died) is None:
        heartbeats.beat(heartbeats.SERVES)
        await asyncio.sleep(_POLL_S)
    return why


async def _stay_with(
    config: Config, engine: EngineProcess, rendezvous: Rendezvous, request: EngineJoin, stop: asyncio.Event, *, again: bool
) -> None:
    """Stay in the run with one controller, from joining to leaving. Raises as `stay`."""
    with contextlib.closing(AsyncClient(rendezvous, rendezvous.controller)) as client:
        with coming(again=again):
            try:
                joined, _ = await client.ask(request, config.cluster.heartbeat_timeout_s + GRACE_S)
            except WaitTimeout as error:
                raise ControllerLost(str(error), "") from error
            except AsyncmoeError as error:
                if (why := engine.died) is None:
                    raise
                raise ServerLost(f"{error}; {engine.name} died meanwhile: {why}") from error
        assert isinstance(joined, EngineJoined)
        log.info("%s has joined", engine.name)
        asking = _orders(client, engine.name, config.cluster.heartbeat_timeout_s, joined.controller)
        async with first_of(asking, watch(engine), stop.wait()) as (orders, health, _):
            if orders.done():
                obey(engine.name, orders.result())
            elif health.done():
                with contextlib.suppress(AsyncmoeError):  # the controller may be lost too
                    await client.ask(EngineLeave(engine.name, health.result()), GRACE_S)
                raise ServerLost(f"{engine.name} died: {health.result()}")
            else:
                await _leave(config, engine.name, client)


async def _orders(client: AsyncClient, name: str, limit_s: float, controller: str) -> EngineOrder:
    """Send heartbeats until the reply is the last order, and return it.

    Raises:
        ControllerLost: the controller is gone, and another may replace it.
        WaitTimeout: it is gone, and none will replace it.
        ServerLost: the controller no longer knows the engine.
    """
    alive = EngineAlive(name, limit_s / 3)
    while True:
        try:
            reply, _ = await client.ask(alive, alive.wait_s + limit_s)
        except WaitTimeout as error:
            if controller:
                raise ControllerLost(str(error), controller) from error
            raise
        except ProtocolError as error:
            raise ServerLost(str(error)) from error
        assert isinstance(reply, EngineOrder)
        if reply.finished or reply.why:
            return reply


async def _leave(config: Config, name: str, client: AsyncClient) -> None:
    """Leave in order. Once this process's parent is gone, wait only `engines.orphan_s`, because the controller may hang."""
    log.info("%s leaves", name)
    asked, orphan_s = client.ask(EngineLeave(name), config.rollout.request_timeout_s + GRACE_S), config.engines.orphan_s
    async with first_of(asked, _orphaned(orphan_s)) as (reply, _):
        if not reply.done():
            raise WaitTimeout("the controller", "it has not let the engine leave", orphan_s)
        reply.result()


async def _orphaned(seconds: float) -> None:
    """Return once this process's parent has been gone for `seconds`. Its death signal is no proof: the end of one thread sends it too."""
    while os.getppid() == _PARENT:
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(seconds)


async def unless(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or None if `stop` is set first."""
    async with first_of(work, stop.wait()) as (working, _):
        return working.result() if working.done() else None
