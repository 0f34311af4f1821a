"""`asyncmoe engine`: one SGLang server on this machine that joins a run and serves until the run ends or a signal stops it.

Every engine of a run runs this way, whoever starts it: the controller owns no engine process. A server that dies or is fenced restarts, so
its loss ends neither its job nor the run. If the controller is lost, the server waits `engines.orphan_s` for the run's next controller,
and joins it with its current weights.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import zlib
from collections.abc import Sequence

from asyncmoe.config import Config
from asyncmoe.engines import backend
from asyncmoe.engines.engine_node import serve_node
from asyncmoe.engines.engine_stay import ServerLost, coming, controller, may_start, stay, unless
from asyncmoe.engines.nodes import process_name
from asyncmoe.errors import UserError
from asyncmoe.process import named
from asyncmoe.rpc import address
from asyncmoe.rpc.environment import STARTS
from asyncmoe.rpc.messages import EngineJoin
from asyncmoe.rpc.peers import facts

log = logging.getLogger(__name__)
BACKOFF_S = 5.0
"""Seconds before the first restart of a server; doubles with each further restart."""


def default_name(index: int) -> str:
    """Return the default name of this machine's engine `index`, unique in the cluster."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    job = os.environ.get("SLURM_JOB_ID")
    return ".".join(["engine", *([f"job{job}"] if job else []), node, str(index)])


def run(config: Config, name: str, index: int, memory: Sequence[str] = (), node: int = 0) -> None:
    """Serve until the run ends, or until SIGTERM or SIGINT. A lost server restarts and rejoins (`engines.restarts`).

    Args:
        index: index of this engine on its machine.
        memory: arguments that limit its GPU memory.
        node: index of this machine among the engine's `engines.nodes`.

    Raises:
        UserError: this machine has no address in `cluster.network`, or a port is taken.
        ConfigError: the controller has a different configuration.
        EngineError: the server did not start, was lost more than `engines.restarts` times, or the run has failed.
        WaitTimeout: the controller did not start, or is gone.
    """
    with named(process_name(name, node)):
        asyncio.run(_serve(config, name, index, memory, node))


def check_node(nodes: int, name: str | None, node: int) -> None:
    """Check the number of the engine's node that this machine is to run.

    Args:
        nodes: `engines.nodes`.
        name: the engine's name; None: not given.

    Raises:
        UserError: the engine has no such node, or has several nodes but no name.
    """
    if not 0 <= node < nodes:
        raise UserError(
            "--node",
            got=node,
            expected=f"0 to {nodes - 1}, because engines.nodes is {nodes}" if nodes > 1 else "0, because engines.nodes is 1",
        )
    if nodes > 1 and name is None:
        raise UserError("--name", got="nothing", expected=f"a name, the same on all {nodes} nodes of the engine (engines.nodes)")


async def _serve(config: Config, name: str, index: int, memory: Sequence[str], node: int = 0) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    restart = int(os.environ.get(STARTS) or 0)
    while True:
        try:
            if config.engines.nodes > 1:
                return await serve_node(config, name, index, node, memory, _seed(name, restart), stop, again=restart > 0)
            return await _serve_once(config, name, index, memory, restart, stop)
        except ServerLost as error:
            restart += 1
            if restart > (most := config.engines.restarts):
                raise ServerLost(f"{error}; engines.restarts allows {most}" if most else str(error)) from error
            log.warning("%s; it starts again, restart %d of %d", error, restart, config.engines.restarts)
        await unless(stop, asyncio.sleep(BACKOFF_S * 2 ** (restart - 1)))
        if stop.is_set():
            return


async def _serve_once(config: Config, name: str, index: int, memory: Sequence[str], restart: int, stop: asyncio.Event) -> None:
    """Start the server, and serve until the run ends or `stop` is set.

    Raises:
        ServerLost: the server was lost after it joined, or did not restart; the run goes on without it.
        AsyncmoeError: as `run`.
    """
    host, key, again = address.reachable(config.cluster.network), secrets.token_urlsafe(32), restart > 0
    with coming(again=again):
        if config.in_turn and not await unless(stop, may_start(config, name)):
            return
        engine = backend.start(name, config, index, host=host, key=key, seed=_seed(name, restart), memory=memory)
    try:
        with coming(again=again):
            there = controller(config.run.dir, config.engines.start_timeout_s)
            ready = await unless(stop, asyncio.gather(there, engine.wait_ready()))
        if ready is not None:
            place = (engine.url, key, address.host_id())
            pid = engine.pid if config.in_turn else 0
            request = EngineJoin(name, *place, engine.tp, engine.ep, config.digest, facts(name), pid=pid)
            await stay(config, engine, ready[0], request, stop, again=again)
    finally:
        await engine.stop()


def _seed(name: str, restart: int) -> int:
    """A restarted engine must not repeat the samples of its earlier start."""
    return (zlib.crc32(name.encode()) >> 1) + restart
