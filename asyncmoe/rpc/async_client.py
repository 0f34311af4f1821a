"""A client for an event loop, with any number of concurrent requests on one connection."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Sequence

import zmq

from asyncmoe.errors import AsyncmoeError, WaitTimeout
from asyncmoe.rpc.client import ConnectionGone, opened
from asyncmoe.rpc.codec import encode
from asyncmoe.rpc.connection import Connection
from asyncmoe.rpc.messages import Reply, Request
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.trajectory import Buffer

_NUMBER = struct.Struct(">Q")
_LOOK_S = 0.1
Answer = tuple[Reply, Sequence[Buffer]]


class AsyncClient:
    """Sends requests in the order of the calls; replies come in any order. Must be created inside the event loop.

    Args:
        peer: name of the server in errors.
    """

    def __init__(self, to: Rendezvous, peer: str) -> None:
        self._peer, self._asked, self._losses, self._closed = peer, 0, 0, False
        self._connection = Connection(to)
        self._waiting: dict[int, tuple[asyncio.Future[Answer], float]] = {}
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._connection.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._take)
        self._looking = self._loop.call_later(_LOOK_S, self._look)

    async def ask(self, request: Request, timeout_s: float) -> Answer:
        """Return the reply to a request, and the frames that follow it.

        Raises:
            WaitTimeout: no reply within `timeout_s`.
            ConnectionGone: the connection is closed or was lost meanwhile: the server has probably died.
            ProtocolError: the reply is malformed, or the request too large.
            AsyncmoeError: the server refused the request.
        """
        name, payload = type(request).__name__, encode(request)
        if self._closed:
            raise ConnectionGone(self._peer, f"{name}: the connection is closed", 0.0)
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[number] = answer, time.monotonic()
        try:
            self._connection.socket.send_multipart([_NUMBER.pack(number), payload], zmq.NOBLOCK)
            self._take()  # sending may have consumed the signal that a reply is there
            async with asyncio.timeout(timeout_s):
                return await answer
        except zmq.Again:
            raise ConnectionGone(self._peer, f"{name}: too many unanswered requests", 0.0) from None
        except TimeoutError as error:
            raise WaitTimeout(self._peer, f"{name}: no reply", timeout_s) from error
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Close the connection; pending requests raise ConnectionGone. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._looking.cancel()
        self._loop.remove_reader(self._descriptor)
        self._fail("it was closed")
        self._connection.close()

    def _take(self) -> None:
        """Receive all available replies: the descriptor signals once for any number of them (ZMQ_FD in zmq_getsockopt(3))."""
        while not self._closed:
            try:
                parts = self._connection.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(parts[0].bytes) != _NUMBER.size:
                continue  # its request is unknown; whoever waits for it times out
            waiting, _ = self._waiting.get(_NUMBER.unpack(parts[0].bytes)[0], (None, 0.0))
            if waiting is None or waiting.done():
                continue
            try:
                waiting.set_result(opened(parts))
            except AsyncmoeError as error:
                waiting.set_exception(error)

    def _look(self) -> None:
        """Fail pending requests when the connection is lost: the server has forgotten where to send their replies."""
        self._connection.look()
        if why := self._connection.why_lost(self._losses):
            self._losses = self._connection.losses
            self._fail(why)
        self._take()
        self._looking = self._loop.call_later(_LOOK_S, self._look)

    def _fail(self, why: str) -> None:
        now = time.monotonic()
        for waiting, asked in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionGone(self._peer, why, now - asked))
