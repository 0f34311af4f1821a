"""The keeper of engines as the controller sees it, and the engines that it owns."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, EngineError, WaitTimeout
from asyncmoe.rollout.engines import backend
from asyncmoe.rollout.engines.engine import Engine
from asyncmoe.rpc import keys
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.environment import KEEPER
from asyncmoe.rpc.keeper_messages import (
    EngineWeights,
    KeeperAsk,
    KeeperEnd,
    KeeperNote,
    KeeperRequest,
    KeeperStart,
    KeeperStop,
    KeeperTake,
    Kept,
    KeptEngine,
)
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.telemetry import processes

_ANSWER_S = 30.0
"""Limit on each request; the longest waits for the end of an engine's processes."""
_POLL_S = 0.2
_START_S = 60.0
"""Seconds in which a keeper that was started beside the controller answers."""


def running(run_dir: Path) -> Rendezvous | None:
    """Return where the keeper of a run's engines on this host is; None if none answers. In a copy of a run's directory there is none: it
    belongs to the run from which the directory was copied."""
    found = keys.keeper(run_dir)
    if found is None:
        return None
    ours = [one for one in processes.read(run_dir) if one.role == "keeper" and processes.runs(one)]
    return found if any(one.pid == found.pid for one in ours) else None


def take_over(config: Config, run_dir: Path, memory: Sequence[str] = ()) -> KeeperClient | None:
    """Take over the keeper of a run's engines on this host, for the controller; None if there is none. Blocks.

    Args:
        memory: as for `KeeperClient`.

    Raises:
        WaitTimeout: the one that was started beside this process does not answer.
        AsyncmoeError: as `KeeperClient`.
    """
    if not config.keeps_engines:
        return None
    begin = time.monotonic()
    while (found := running(run_dir)) is None and os.environ.get(KEEPER):
        if time.monotonic() - begin > _START_S:
            raise WaitTimeout("the keeper of engines", "start; see logs/keeper.log", _START_S)
        time.sleep(_POLL_S)
    return None if found is None else KeeperClient(found, config, memory)


class KeeperClient:
    """Asks the keeper from one thread, in order. It takes over what the keeper has; from then on older controllers are refused.

    Attributes:
        epoch: number of this controller, from 1.
        found: engines that the controller before this one left, by index.
        weights: what these hold.

    Args:
        memory: memory arguments of engines that are started; see `backend.start`.

    Raises:
        AsyncmoeError: it does not answer, or keeps the engines of another configuration.
    """

    def __init__(self, rendezvous: Rendezvous, config: Config, memory: Sequence[str] = ()) -> None:
        self._client = Client(rendezvous, "controller", peer="the keeper of engines")
        self._memory, self._gone = tuple(memory), ""
        self._thread = ThreadPoolExecutor(1, "keeper")
        self._states: dict[int, KeptEngine] = {}
        kept = self._now(KeeperTake(config.digest, os.getpid()))
        self.epoch, self.found, self.weights = kept.epoch, dict(self._states), kept.weights

    @property
    def is_first(self) -> bool:
        """Whether no controller before this one has left engines."""
        return not self.found

    def engine(self, index: int) -> KeptProcess:
        """Return an engine that was left, or start it. Call it in the event loop's thread."""
        return KeptProcess(self, self.found[index]) if index in self.found else self.start(index)

    def forget(self) -> None:
        """Forget what was left, which has been stopped."""
        self.found, self.weights = {}, EngineWeights()

    def start(self, index: int) -> KeptProcess:
        """Start an engine that does not run.

        Raises:
            UserError: its port is taken.
            AsyncmoeError: the keeper is gone.
        """
        self._now(KeeperStart(self.epoch, index, self._memory))
        return KeptProcess(self, self._states[index])

    def state(self, index: int) -> KeptEngine:
        """Return the newest known state of an engine."""
        return self._states[index]

    @property
    def gone(self) -> str:
        """Why the keeper does not answer any more, so that its engines have ended; empty: it does."""
        return self._gone

    async def watch(self) -> None:
        """Follow the states of all engines; never returns."""
        while True:
            try:
                await asyncio.wrap_future(self._ask(KeeperAsk(self.epoch)))
            except AsyncmoeError as error:
                self._gone = f"the keeper of engines is gone: {error}"
                return
            await asyncio.sleep(_POLL_S)

    def kill(self, index: int) -> None:
        """Kill an engine, without waiting."""
        self._ask(KeeperStop(self.epoch, index))

    async def stop(self, index: int) -> None:
        """End an engine with every process it spawned. A keeper that is gone has ended them.

        Raises:
            AsyncmoeError: the keeper refused.
        """
        if not self._gone:
            await asyncio.wrap_future(self._ask(KeeperStop(self.epoch, index, wait=True)))

    async def note(self, weights: EngineWeights) -> None:
        """Have the keeper keep what the engines hold, for the next controller; returns when it has.

        Raises:
            AsyncmoeError: it is gone.
        """
        await asyncio.wrap_future(self._ask(KeeperNote(self.epoch, weights)))

    async def end(self) -> None:
        """Tell it that the run is over: it ends all engines."""
        if not self._gone:
            await asyncio.wrap_future(self._ask(KeeperEnd(self.epoch)))

    def close(self) -> None:
        """Close the connection; the keeper goes on."""
        self._thread.shutdown(cancel_futures=True)
        self._client.close()

    def _ask(self, request: KeeperRequest) -> Future[object]:
        return self._thread.submit(self._answer, request)

    def _answer(self, request: KeeperRequest) -> object:
        """Ask. States are taken in this thread, so that they have the order of the answers."""
        answer = self._client.ask(request, _ANSWER_S)[0]
        if isinstance(answer, Kept):
            self._states = {engine.index: engine for engine in answer.engines}
        return answer

    def _now(self, request: KeeperRequest) -> Kept:
        kept = self._ask(request).result()
        assert isinstance(kept, Kept)
        return kept


class KeptProcess:
    """An engine that the keeper owns; an `asyncmoe.rollout.engines.engine.EngineProcess`.

    Attributes:
        client: client of its server, from this process.
    """

    def __init__(self, keeper: KeeperClient, kept: KeptEngine) -> None:
        self.name, self.tp, self.ep, self.host, self.url = kept.name, kept.tp, kept.ep, kept.host, kept.url
        self.client: Engine = backend.connect(kept.name, kept.url, kept.key)
        self._keeper, self._index = keeper, kept.index

    @property
    def died(self) -> str | None:
        """Why it ended, or None while it runs."""
        state = self._keeper.state(self._index)
        return self._keeper.gone or (state.died if state.url == self.url else "another has taken its place")

    async def wait_ready(self) -> None:
        """Return once the server accepts requests.

        Raises:
            EngineError: the server died first, or took too long; or the keeper is gone.
        """
        while not self._keeper.state(self._index).ready:
            if (why := self.died) is not None:
                raise EngineError(why)
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Close the client, and end the server with every process it spawned."""
        await self.client.close()
        await self._keeper.stop(self._index)

    def kill(self) -> None:
        """Kill the server with every process it spawned, without waiting."""
        self._keeper.kill(self._index)
