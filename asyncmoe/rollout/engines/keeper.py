"""The keeper: a process that owns the engines of its machine, so that they outlive their controller.

A launcher starts it beside the controller, which asks it for engines (`asyncmoe.rollout.engines.kept`). If the controller ends, the engines
go on with what they have, and the next controller takes them over. If none has come within `engines.orphan_s`, the keeper ends them and
itself, whoever else is left. It also keeps what the controller says of their weights: nothing else tells whether an engine holds a whole
version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, ProtocolError
from asyncmoe.process import named
from asyncmoe.rollout.engines import backend
from asyncmoe.rollout.engines.engine import EngineProcess
from asyncmoe.rpc import keys, nccl_settings
from asyncmoe.rpc.keeper_messages import (
    EngineWeights,
    KeeperAsk,
    KeeperEnd,
    KeeperNote,
    KeeperStart,
    KeeperStop,
    KeeperTake,
    Kept,
    KeptEngine,
)
from asyncmoe.rpc.messages import Done, Reply, Request
from asyncmoe.rpc.server import Server
from asyncmoe.telemetry import heartbeats, processes

log = logging.getLogger(__name__)
_LOOK_S = 0.5


@named("keeper")
def run(config: Config, run_dir: Path, launcher: int) -> None:
    """Keep engines until a controller ends the run, SIGTERM, or `engines.orphan_s` after the last controller's end.

    Every engine has ended when this function returns or raises.

    Args:
        launcher: process id of the process that started this one: without it no controller comes.

    Raises:
        StorageError: the keeper's address cannot be written.
        AsyncmoeError: no controller came in time.
    """
    asyncio.run(_serve(Keeper(config, run_dir, launcher), run_dir))


async def _serve(keeper: Keeper, run_dir: Path) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, keeper.over.set)
    try:
        async with Server(keeper.answer, here_only=True) as server:
            rendezvous = await server.start()
            keys.write_keeper(run_dir, rendezvous)
            tasks = [asyncio.create_task(server.serve()), asyncio.create_task(keeper.watch()), asyncio.create_task(keeper.over.wait())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                keys.remove_keeper(run_dir, rendezvous)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await keeper.stop_all()


class Keeper:
    """The engines, and the answers to the controller. All calls come from the main thread, which alone may start engines.

    Attributes:
        over: set when the engines are to end.
    """

    def __init__(self, config: Config, run_dir: Path, launcher: int, runs: Callable[[processes.Recorded], bool] = processes.runs) -> None:
        self.over = asyncio.Event()
        self._config, self._run_dir, self._runs = config, run_dir, runs
        self._launcher = launcher  # not this process's parent, which is another one if the launcher has ended
        self._controller: processes.Recorded | None = None
        self._epoch, self._weights = 0, EngineWeights()
        self._engines: dict[int, _Held] = {}
        self._starts: dict[int, int] = {}

    async def answer(self, request: Request) -> Reply:
        """Answer one request of a controller.

        Raises:
            ProtocolError: it is another peer's, comes from a controller that another has replaced, or starts an engine that runs.
            UserError: the engine's port is taken.
        """
        match request:
            case KeeperTake():
                return self._take(request)
            case KeeperStart() | KeeperStop() | KeeperNote() | KeeperAsk():
                self._check(type(request).__name__, request.epoch)
            case KeeperEnd():
                if request.epoch:
                    self._check("KeeperEnd", request.epoch)
            case _:
                raise ProtocolError(f"{type(request).__name__}: got it at the keeper of engines, expected it at the controller")
        match request:
            case KeeperStart():
                self._start(request)
            case KeeperStop():
                await self._stop(request)
            case KeeperNote():
                self._weights = request.weights
            case KeeperEnd():
                self.over.set()
        return self._kept() if isinstance(request, KeeperStart | KeeperAsk) else Done()

    async def watch(self) -> None:
        """Look for the controller; never returns.

        Raises:
            AsyncmoeError: none has been there for `engines.orphan_s`.
        """
        limit, alone = self._config.engines.orphan_s, None
        while True:
            heartbeats.beat("looks after its engines")
            now = time.monotonic()
            alone = None if self._guarded() else (alone or now)
            if alone is not None and now - alone > limit:
                raise AsyncmoeError(f"no controller for {limit:.0f} s (engines.orphan_s): the engines end")
            await asyncio.sleep(_LOOK_S)

    async def stop_all(self) -> None:
        """End all engines."""
        await asyncio.gather(*(held.stop() for held in self._engines.values()))

    def _guarded(self) -> bool:
        """Whether a controller runs, or before the first one, whoever started this process."""
        return os.getppid() == self._launcher if self._controller is None else self._runs(self._controller)

    def _take(self, request: KeeperTake) -> Kept:
        if (request.config_digest, request.nccl) != (self._config.digest, nccl_settings.shared()):
            raise ProtocolError("the engines that are kept have another configuration, or other settings of NCCL; end them first")
        self._epoch += 1
        self._controller = processes.of("controller", request.pid, self._run_dir)
        log.info("controller %d, process %d, has %d engine(s)", self._epoch, request.pid, len(self._engines))
        return self._kept()

    def _check(self, what: str, epoch: int) -> None:
        if epoch != self._epoch:
            raise ProtocolError(
                f"{what}: got it from controller {epoch} of these engines, expected controller {self._epoch}, which has taken its place: "
                "this process is left over and must end"
            )

    def _start(self, request: KeeperStart) -> None:
        index, count = request.index, self._config.engines.count
        if index >= count:
            raise ProtocolError(f"KeeperStart: got engine {index}, expected less than engines.count = {count}")
        if index in self._engines and not self._engines[index].stopped:
            raise ProtocolError(f"KeeperStart: engine {index} was not stopped")
        attempt = self._starts.get(index, 0)
        self._starts[index] = attempt + 1
        seed = index + attempt * count  # a restarted engine must not draw the samples of its start again
        key = secrets.token_urlsafe(32)
        engine = backend.start(f"engine.{index}", self._config, index, self._run_dir, key=key, seed=seed, memory=request.memory)
        self._engines[index] = _Held(index, engine, key)

    async def _stop(self, request: KeeperStop) -> None:
        held = self._engines.get(request.index)
        if held is None:
            return
        if request.wait:
            await held.stop()
        else:
            held.engine.kill()

    def _kept(self) -> Kept:
        engines = tuple(self._engines[index].state() for index in sorted(self._engines))
        return Kept(self._epoch, engines, self._weights)


class _Held:
    """An engine, and its start."""

    def __init__(self, index: int, engine: EngineProcess, key: str) -> None:
        self.engine, self.stopped = engine, False
        self._index, self._key = index, key
        self._starting = asyncio.create_task(engine.wait_ready())

    def state(self) -> KeptEngine:
        """Return what the controller needs to know."""
        engine, ready, died = self.engine, False, None
        if self.stopped:
            died = "it was stopped"
        elif self._starting.done():
            error = None if self._starting.cancelled() else self._starting.exception()
            if error is not None and not isinstance(error, AsyncmoeError):
                raise error
            ready, died = error is None, engine.died if error is None else str(error)
        return KeptEngine(self._index, engine.name, engine.url, self._key, engine.tp, engine.ep, engine.host, ready, died)

    async def stop(self) -> None:
        """End it. Idempotent."""
        self.stopped = True
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        await self.engine.stop()
