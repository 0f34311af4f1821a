"""The gate in front of the engines: limits the requests inside, admits none while closed, and admits in the order of `Waiting`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncmoe.engines.scheduling import ScheduledRequest, Waiting


class Gate:
    """Admits requests; initially open.

    A request that is cancelled while it waits, or at the moment of its admission, takes no slot. Slots freed while the gate is closed are
    assigned when it opens: by then, the responses that the closing cut short wait again, and go first.

    Attributes:
        inside: number of admitted requests that have not left; at most `limit`.
    """

    def __init__(self, limit: int, waiting: Waiting) -> None:
        self.inside = 0
        self._limit, self._waiting = limit, waiting
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        """Admit no request until `open`; requests inside stay."""
        self._open.clear()

    def open(self) -> None:
        self._open.set()
        self._admit()

    @asynccontextmanager
    async def place(self, request: ScheduledRequest) -> AsyncIterator[None]:
        """Wait for admission, and leave at the end of the block. The gate is open when the block begins."""
        await self._enter(request)
        try:
            # The gate may have closed since it admitted this request.
            while not self._open.is_set():
                await self._open.wait()
            yield
        finally:
            self._leave()

    async def _enter(self, request: ScheduledRequest) -> None:
        ticket, call = self._waiting.come(request), asyncio.get_running_loop().create_future()
        self._calls[ticket] = call
        self._admit()
        try:
            await call
        except asyncio.CancelledError:
            if self._calls.pop(ticket, None) is not None:
                self._waiting.give_up(ticket)
            elif not call.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        self.inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._open.is_set() and self.inside < self._limit and len(self._waiting):
            call = self._calls.pop(self._waiting.take())
            if not call.cancelled():
                call.set_result(None)
                self.inside += 1
