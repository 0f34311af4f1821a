"""A rollout worker as the controller sees it: its connection, and whether it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from asyncmoe.errors import AsyncmoeError, TrajectoryRejected, WaitTimeout
from asyncmoe.log.turns import EpisodeId
from asyncmoe.queue.group_buffer import Group
from asyncmoe.rollout.async_tasks import begun, cancelled
from asyncmoe.rpc.async_client import AsyncClient
from asyncmoe.rpc.messages import Done, Reply, Request
from asyncmoe.rpc.worker_messages import (
    LOST,
    EngineUse,
    WorkerAsk,
    WorkerEnd,
    WorkerEngines,
    WorkerForget,
    WorkerJoin,
    WorkerNews,
    WorkerPack,
    WorkerPacked,
    WorkerShow,
)

R = TypeVar("R", bound=Reply)
_ANSWER_S = 30.0


class RemoteWorker:
    """One worker. For the controller's event loop.

    Args:
        lost: called once, when the worker is lost.
        heard: called with its news.

    Attributes:
        joined: the request with which it joined.
        gone: why it is lost; empty if it is not.
        engines: the engines it was last told of.
        telling: tasks that tell it of engines, until it confirms.
        uses: its latest report on the engines, by serial number.
        running: number of episodes that run there.
        ended: the episodes that have ended there and are not yet part of a group.
    """

    def __init__(self, joined: WorkerJoin, lost: Callable[[RemoteWorker], None], heard: Callable[[RemoteWorker, WorkerNews], None]) -> None:
        self.joined, self.gone, self._lost, self._heard = joined, "", lost, heard
        self.name = f"rollout worker {joined.number}"
        self.engines: WorkerEngines | None = None
        self.telling: set[asyncio.Task[None]] = set()
        self.uses: dict[int, EngineUse] = {}
        self.running = 0
        self.ended: set[EpisodeId] = set()
        self._client = AsyncClient(joined.rendezvous, self.name)
        self._asking: set[asyncio.Task[None]] = set()

    async def ask(self, request: Request, kind: type[R], timeout_s: float = _ANSWER_S) -> R:
        """Return the worker's reply, of type `kind`. Raises as `AsyncClient.ask`."""
        reply, _ = await self._client.ask(request, timeout_s)
        assert isinstance(reply, kind)
        return reply

    async def do(self, request: Request, kind: type[R], timeout_s: float) -> R:
        """As `ask`, but a worker that does not answer is lost.

        Raises:
            TrajectoryRejected: the worker's rejection; or `LOST`.
            AsyncmoeError: the run cannot go on.
        """
        try:
            if not self.gone:
                return await self.ask(request, kind, timeout_s)
        except WaitTimeout as error:  # the connection is lost, or there is no answer
            self.lose(str(error))
        raise TrajectoryRejected(LOST, self.gone)

    async def pack(self, request: WorkerPack | WorkerShow, timeout_s: float) -> list[Group]:
        """Let the worker assemble groups, and return them. Raises as `do`."""
        packed = await self.do(request, WorkerPacked, timeout_s)
        return [Group(0, made.items, made.attempt, made.place) for made in packed.groups]

    def tell(self, request: Request, timeout_s: float = _ANSWER_S) -> asyncio.Task[None]:
        """Send a request whose answer may be news, without waiting. A worker that does not answer is lost."""
        return begun(self._hear(request, timeout_s), self._asking)

    def follow(self) -> None:
        """Ask for news continuously, so that a pending request always fails with the connection."""
        begun(self._ask_always(), self._asking)

    def forget(self, episodes: Sequence[EpisodeId] = (), groups: Sequence[int] = ()) -> None:
        """Make the worker end and forget episodes, rejecting running ones as `LOST`, and forget groups."""
        self.ended.difference_update(episodes)
        self.tell(WorkerForget(tuple(episodes), tuple(groups)))

    def lose(self, why: str) -> None:
        """Mark the worker as lost, and fail all requests to it."""
        if not self.gone:
            self.gone = why
            self._lost(self)
            self._client.close()

    async def end(self) -> None:
        """Tell the worker that the run is over, and stop waiting for other answers."""
        await cancelled(self._asking)
        if not self.gone:
            with suppress(AsyncmoeError):
                await self.ask(WorkerEnd(), Done)
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    async def _ask_always(self) -> None:
        while not self.gone:
            await self._hear(WorkerAsk(), _ANSWER_S)

    async def _hear(self, request: Request, timeout_s: float) -> None:
        if self.gone:
            return
        try:
            reply, _ = await self._client.ask(request, timeout_s)
            if isinstance(reply, WorkerNews):
                self._heard(self, reply)
        except AsyncmoeError as error:
            self.lose(str(error))
