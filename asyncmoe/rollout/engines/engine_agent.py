"""`asyncmoe engine`: one SGLang server on this machine that joins a run and serves until the run ends or a signal stops it.

A server that dies or is fenced starts again, so that the loss of one ends neither a job nor a run. If the controller is lost, the server
goes on for `engines.orphan_s`, and joins the next controller with the weights that it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
import zlib
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, EngineError, ProtocolError, WaitTimeout
from asyncmoe.process import named
from asyncmoe.rollout.engines import backend
from asyncmoe.rollout.engines.engine import EngineProcess
from asyncmoe.rollout.engines.restarts import BACKOFF_S
from asyncmoe.rpc import address, keys
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import EngineAlive, EngineJoin, EngineJoined, EngineLeave, EngineOrder
from asyncmoe.rpc.peers import facts
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.telemetry import heartbeats

log = logging.getLogger(__name__)
T = TypeVar("T")
_POLL_S = 0.5
_GRACE_S = 10.0


class ServerLost(EngineError):
    """The server died or was fenced, and the run goes on without it."""


class ControllerLost(AsyncmoeError):
    """The controller is gone, and the server goes on. `controller`: its name."""

    def __init__(self, why: str, controller: str) -> None:
        super().__init__(why)
        self.controller = controller


def default_name(index: int) -> str:
    """Return the default name of this machine's engine `index`, unique in the cluster."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    job = os.environ.get("SLURM_JOB_ID")
    return ".".join(["engine", *([f"job{job}"] if job else []), node, str(index)])


def run(config: Config, run_dir: Path, name: str, index: int, memory: Sequence[str] = ()) -> None:
    """Serve until the run ends, or until SIGTERM or SIGINT. A server that is lost starts again and joins again (`engines.restarts`).

    Args:
        index: index of this engine on its machine.
        memory: see `asyncmoe.rollout.engines.backend.start`.

    Raises:
        UserError: this machine has no address in `cluster.network`, or a port is taken.
        ConfigError: the controller has a different configuration.
        EngineError: the server did not start, or died or was fenced too often, or the run has failed.
        WaitTimeout: the controller did not start, or is gone.
    """
    with named(name):
        asyncio.run(_serve(config, run_dir, name, index, memory))


async def _serve(config: Config, run_dir: Path, name: str, index: int, memory: Sequence[str]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    restart = 0
    while True:
        try:
            return await _serve_once(config, run_dir, name, index, memory, restart, stop)
        except ServerLost as error:
            restart += 1
            if restart > config.engines.restarts:
                raise
            log.warning("%s; it starts again, restart %d of %d", error, restart, config.engines.restarts)
        await asyncio.wait([stopping := asyncio.create_task(stop.wait())], timeout=BACKOFF_S * 2 ** (restart - 1))
        stopping.cancel()
        if stop.is_set():
            return


async def _serve_once(
    config: Config, run_dir: Path, name: str, index: int, memory: Sequence[str], restart: int, stop: asyncio.Event
) -> None:
    """Start the server, and serve until the run ends or `stop` is set.

    Raises:
        ServerLost: the server has joined and is lost, but the run goes on without it.
        AsyncmoeError: as `run`.
    """
    host, key = address.reachable(config.cluster.network), secrets.token_urlsafe(32)
    seed = (zlib.crc32(name.encode()) >> 1) + restart  # a restarted engine must not draw the samples of its start again
    engine = backend.start(name, config, index, run_dir, host=host, key=key, seed=seed, memory=memory)
    try:
        ready = await _unless(stop, _ready(engine, run_dir, config.engines.start_timeout_s))
        if ready is not None:
            place = (engine.url, key, address.host_id())
            request = EngineJoin(name, *place, engine.tp, engine.ep, config.digest, facts(name))
            await _stay(config, run_dir, engine, ready, request, stop)
    finally:
        await engine.stop()


async def _stay(
    config: Config, run_dir: Path, engine: EngineProcess, rendezvous: Rendezvous, request: EngineJoin, stop: asyncio.Event
) -> None:
    """Stay in the run to its end, with one controller after the other.

    Raises:
        ServerLost: the server is lost, or must start again to serve another controller.
        WaitTimeout: the controller is lost, and no other came within `engines.orphan_s`.
    """
    lost: ControllerLost | None = None
    while True:
        try:
            return await _Stay(config, engine, rendezvous).until(stop, request)
        except ControllerLost as error:
            lost, until = error, time.monotonic() + config.engines.orphan_s
            log.warning("%s; waiting for the next controller", lost)
        except WaitTimeout as error:
            if lost is None:
                raise
            log.warning("%s", error)  # the next one was lost before it answered
        except EngineError as error:
            if lost is None or isinstance(error, ServerLost):
                raise
            raise ServerLost(str(error)) from error
        following = await _unless(stop, _following(run_dir, engine, until))
        if following is None:
            if stop.is_set():
                return
            raise WaitTimeout("the next controller", str(lost), config.engines.orphan_s)
        # The facts were true when they were sent.
        rendezvous, request = following, msgspec.structs.replace(request, facts=None, served=lost.controller)


async def _following(run_dir: Path, engine: EngineProcess, until: float) -> Rendezvous | None:
    """Wait for a controller that answers; None: there was none in time. Raises ServerLost if the server dies meanwhile."""
    while time.monotonic() < until:
        heartbeats.beat("waiting for the next controller")
        with contextlib.suppress(WaitTimeout):
            return await asyncio.to_thread(keys.read, run_dir, 0.0)
        if engine.died is not None:
            raise ServerLost(f"{engine.name} died: {engine.died}")
        await asyncio.sleep(_POLL_S)
    return None


async def _ready(engine: EngineProcess, run_dir: Path, wait_s: float) -> Rendezvous:
    rendezvous, _ = await asyncio.gather(_controller(run_dir, wait_s), engine.wait_ready())
    return rendezvous


async def _controller(run_dir: Path, wait_s: float) -> Rendezvous:
    """Wait for the controller, which may start after this process, and return its rendezvous."""
    begin = time.monotonic()
    while True:
        try:
            return await asyncio.to_thread(keys.read, run_dir, 0.0)
        except WaitTimeout as error:
            waited = time.monotonic() - begin
            if waited > wait_s:
                raise WaitTimeout(error.whom, error.what, waited) from None
        await asyncio.sleep(_POLL_S)


class _Stay:
    """An engine's membership in a run, from joining to leaving."""

    def __init__(self, config: Config, engine: EngineProcess, rendezvous: Rendezvous) -> None:
        self._config, self._engine, self._rendezvous = config, engine, rendezvous

    async def until(self, stop: asyncio.Event, request: EngineJoin) -> None:
        with Client(self._rendezvous, request.name) as client:
            limit = self._config.cluster.heartbeat_timeout_s
            joined = (await asyncio.to_thread(client.ask, request, limit + _GRACE_S))[0]
            assert isinstance(joined, EngineJoined)
            log.info("%s has joined", request.name)
            orders = asyncio.create_task(self._orders(client, joined.controller))
            health = asyncio.create_task(self._watch())
            stopping = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait([orders, health, stopping], return_when=asyncio.FIRST_COMPLETED)
            try:
                if orders in done or health in done:
                    await self._ended(orders, health)
                else:
                    await self._leave()
            finally:
                for task in (health, stopping):
                    task.cancel()
                # Its thread uses the client; the controller answers it soon, or is gone.
                with contextlib.suppress(AsyncmoeError):
                    await orders

    async def _orders(self, client: Client, controller: str) -> EngineOrder:
        """Send heartbeats until an answer is the last order.

        Raises:
            ControllerLost: it is gone, and another may take its place.
            WaitTimeout: it is gone.
        """
        limit = self._config.cluster.heartbeat_timeout_s
        alive = EngineAlive(self._engine.name, limit / 3)
        while True:
            try:
                reply = (await asyncio.to_thread(client.ask, alive, alive.wait_s + limit))[0]
            except (WaitTimeout, ProtocolError) as error:  # ProtocolError: the next controller answers at the same address
                if controller:
                    raise ControllerLost(str(error), controller) from error
                raise
            assert isinstance(reply, EngineOrder)
            if reply.finished or reply.why:
                return reply

    async def _watch(self) -> str:
        while (why := self._engine.died) is None:
            heartbeats.beat("looks after its server")
            await asyncio.sleep(_POLL_S)
        return why

    async def _ended(self, orders: asyncio.Task[EngineOrder], health: asyncio.Task[str]) -> None:
        if orders.done():
            order = orders.result()
            if order.why:
                kind = ServerLost if order.again else EngineError
                raise kind(f"{self._engine.name} was ended by the controller: {order.why}")
            return
        await self._ask(EngineLeave(self._engine.name, health.result()), _GRACE_S)
        raise ServerLost(f"{self._engine.name} died: {health.result()}")

    async def _leave(self) -> None:
        log.info("%s leaves", self._engine.name)
        await self._ask(EngineLeave(self._engine.name), self._config.rollout.request_timeout_s + _GRACE_S)

    async def _ask(self, request: EngineLeave, timeout_s: float) -> None:
        with Client(self._rendezvous, f"{self._engine.name}.leaving") as client:
            await asyncio.to_thread(client.ask, request, timeout_s)


async def _unless(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or None if `stop` is set first."""
    working, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
