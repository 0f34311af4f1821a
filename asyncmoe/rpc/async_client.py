"""A client for an event loop, with any number of requests under way on one connection."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from asyncmoe.errors import ProtocolError, WaitTimeout
from asyncmoe.rpc import local
from asyncmoe.rpc.client import rebuild
from asyncmoe.rpc.codec import MAX_FRAME_BYTES, decode_reply, encode
from asyncmoe.rpc.messages import Refused, Reply, Request
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.trajectory import Buffer

_NUMBER = struct.Struct(">Q")
Answer = tuple[Reply, Sequence[Buffer]]


class AsyncClient:
    """Sends requests in the order of the calls; replies come in any order. Must be made inside the event loop.

    Args:
        peer: name of the server in errors.
    """

    def __init__(self, to: Rendezvous, peer: str) -> None:
        self._peer = peer
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        here = local.reachable(to.local_dir)
        if here:
            self._socket.plain_username, self._socket.plain_password = local.USER.encode(), to.local_secret.encode()
        else:
            self._socket.curve_serverkey = to.server_public.encode()
            self._socket.curve_publickey = to.client_public.encode()
            self._socket.curve_secretkey = to.client_secret.encode()
        for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, MAX_FRAME_BYTES), (zmq.SNDHWM, 0)):
            self._socket.setsockopt(option, value)
        self._socket.connect(local.address(Path(to.local_dir)) if here else to.address)
        self._asked = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._sending = asyncio.Lock()
        self._receiving = asyncio.create_task(self._receive())

    async def ask(self, request: Request, timeout_s: float) -> Answer:
        """Return the reply to a request, and the frames that follow it.

        Raises:
            WaitTimeout: no reply within `timeout_s`: the server is gone, or does not answer.
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
        """Close the connection; requests under way end with `WaitTimeout`'s limit or are cancelled by their callers."""
        self._receiving.cancel()
        with suppress(asyncio.CancelledError):
            await self._receiving
        self._socket.close(0)
        self._context.term()

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
            except (ProtocolError, msgspec.MsgspecError) as error:
                waiting.set_exception(error)
