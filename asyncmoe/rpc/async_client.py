"""A client for an event loop, with any number of requests under way on one connection."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Sequence

import zmq.asyncio

from asyncmoe.errors import ProtocolError, WaitTimeout
from asyncmoe.rpc.client import ConnectionGone, rebuild
from asyncmoe.rpc.codec import decode_reply, encode
from asyncmoe.rpc.connection import Connection
from asyncmoe.rpc.messages import Refused, Reply, Request
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.trajectory import Buffer

_NUMBER = struct.Struct(">Q")
_LOOK_S = 0.1
Answer = tuple[Reply, Sequence[Buffer]]


class AsyncClient:
    """Sends requests in the order of the calls; replies come in any order. Must be made inside the event loop.

    Args:
        peer: name of the server in errors.
    """

    def __init__(self, to: Rendezvous, peer: str) -> None:
        self._peer, self._asked = peer, 0
        self._connection = Connection(to)
        self._socket = zmq.asyncio.Socket(self._connection.socket)  # a second handle of the same socket, for the event loop
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._sending = asyncio.Lock()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    async def ask(self, request: Request, timeout_s: float) -> Answer:
        """Return the reply to a request, and the frames that follow it.

        Raises:
            WaitTimeout: no reply within `timeout_s`.
            ConnectionGone: the connection was lost meanwhile: the server has probably died.
            ProtocolError: the reply is malformed, or the request too large.
            AsyncmoeError: the server refused the request.
        """
        payload = encode(request)
        self._asked += 1
        number = self._asked
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                async with self._sending:
                    await self._socket.send_multipart([_NUMBER.pack(number), payload])
                reply, frames = await answer
        except TimeoutError as error:
            raise WaitTimeout(self._peer, f"{type(request).__name__}: no reply", timeout_s) from error
        finally:
            del self._waiting[number]
        if isinstance(reply, Refused):
            raise rebuild(reply)
        return reply, frames

    async def close(self) -> None:
        """Close the connection; whoever still waits for a reply gets ConnectionGone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail("it was closed", 0.0)
        self._connection.close()

    async def _receive(self) -> None:
        while True:
            parts = await self._socket.recv_multipart(copy=False)
            if len(parts) < 2 or len(parts[0].bytes) != _NUMBER.size:
                continue  # nobody can be told whose reply it was; whoever waits for it gets its time-out
            waiting = self._waiting.get(_NUMBER.unpack(parts[0].bytes)[0])
            if waiting is None or waiting.done():
                continue
            try:
                waiting.set_result((decode_reply(parts[1].buffer), [part.buffer.toreadonly() for part in parts[2:]]))
            except ProtocolError as error:
                waiting.set_exception(error)

    async def _watch(self) -> None:
        """Tell those who wait when the connection is lost: the server forgets whom it owes a reply."""
        losses, since = 0, time.monotonic()
        while True:
            self._connection.look()
            if self._connection.losses > losses or self._connection.refused:
                losses = self._connection.losses
                self._fail("it rejected our key" if self._connection.refused else "the connection was lost", time.monotonic() - since)
            await asyncio.sleep(_LOOK_S)

    def _fail(self, why: str, seconds: float) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionGone(self._peer, why, seconds))
