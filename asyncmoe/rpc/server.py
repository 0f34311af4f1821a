"""The server of the controller and of rollout workers: concurrent requests, one reply to each.

A request is two frames, its number and a msgpack message; a reply is the number, a message and the frames it announces. The client chooses
the number and the server echoes it, so a late reply cannot be taken for a reply to another request. Every request runs as its own task: a
request that waits (`Lease`, `EnginesAsk`) blocks no others.

An `AsyncmoeError` is answered with `Refused`. An `InvariantBroken` or any other exception is a fault of this side and ends `serve` with
that exception: the run stops rather than continue with a corrupt queue.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from asyncmoe import errors
from asyncmoe.errors import AsyncmoeError, InvariantBroken, ProtocolError, UserError
from asyncmoe.rpc import local
from asyncmoe.rpc.codec import MAX_FRAME_BYTES, decode_request, encode
from asyncmoe.rpc.messages import Refused, Reply, Request
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.trajectory import Buffer

Handler = Callable[[Request], Awaitable[Reply | tuple[Reply, list[Buffer]]]]
_MAX_ERROR_TEXT = 16 << 10
_LINGER_MS = 1_000
_IO_THREADS = 2
"""Two threads encrypt for two clients in parallel."""


class Server:
    """Serves one handler to every holder of the run's client key.

    Args:
        handler: async callable from a request to its reply, or to a reply and the frames that follow it. Called concurrently.
        host: address to listen on; loopback unless the trainer is on another machine.
        port: 0: any free port.
        here_only: serve only clients on this host, over the Unix socket, and listen on no port.
    """

    def __init__(self, handler: Handler, *, host: str = "127.0.0.1", port: int = 0, here_only: bool = False) -> None:
        self._handler, self._host, self._port, self._here_only = handler, host, port, here_only
        # ZeroMQ allows one authentication handler per context, so the server has its own context.
        self._context = zmq.asyncio.Context(_IO_THREADS)
        self._sockets: list[zmq.asyncio.Socket] = []
        self._encoded: tuple[Reply, bytes] | None = None
        self._started = ExitStack()

    async def start(self) -> Rendezvous:
        """Bind, and return the rendezvous for `asyncmoe.rpc.keys.write`, which passes it to clients. No request is answered before `serve`.

        Raises:
            UserError: the port is in use, or the address does not belong to this machine.
        """
        authenticator = AsyncioAuthenticator(self._context)
        authenticator.start()
        self._started.callback(authenticator.stop)
        (server_public, server_secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        local_secret = secrets.token_urlsafe(32)
        authenticator.configure_curve_callback("*", SimpleNamespace(callback=lambda domain, key: key == client_public))
        authenticator.configure_plain("*", {local.USER: local_secret})
        remote_address = "" if self._here_only else self._listen(server_secret)
        here = self._router()
        here.plain_server = True
        scratch = local.make()
        self._started.callback(scratch.remove)
        here_address = local.address(scratch.path)
        here.bind(here_address)
        return Rendezvous(
            address=remote_address or here_address,
            server_public=server_public.decode(),
            client_public=client_public.decode(),
            client_secret=client_secret.decode(),
            host=socket.gethostname(),
            pid=os.getpid(),
            started=time.time(),
            local_dir=str(scratch.path),
            local_secret=local_secret,
        )

    def _listen(self, secret: bytes) -> str:
        """Listen on the port for holders of the client key, and return the address."""
        remote = self._router()
        remote.curve_server, remote.curve_secretkey = True, secret
        try:
            remote.bind(f"tcp://{self._host}:{self._port}")
        except zmq.ZMQError as error:
            raise _explain(error, self._host, self._port) from error
        return remote.getsockopt_string(zmq.LAST_ENDPOINT)

    async def serve(self) -> None:
        """Answer requests until cancelled.

        Raises:
            Exception: the handler's exception, if it is an `InvariantBroken` or not an `AsyncmoeError`. All other requests are cancelled.
        """
        # The receivers end without an error only if they are cancelled together with this task.
        first: BaseException = asyncio.CancelledError()
        try:
            async with asyncio.TaskGroup() as tasks:
                for router in self._sockets:
                    tasks.create_task(self._receive(router, tasks))
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
        # Raised outside the except block, so that the exception keeps its own cause and context.
        raise first

    async def close(self) -> None:
        """Close the sockets. Replies already queued have one second to leave."""
        self._started.close()
        while self._sockets:
            self._sockets.pop().close(_LINGER_MS)
        await asyncio.to_thread(self._context.term)

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _router(self) -> zmq.asyncio.Socket:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # A ROUTER with a full send buffer drops replies silently. The requests in flight already bound the buffer.
        router.setsockopt(zmq.SNDHWM, 0)
        self._sockets.append(router)
        return router

    async def _receive(self, router: zmq.asyncio.Socket, tasks: asyncio.TaskGroup) -> None:
        while True:
            sender, *frames = await router.recv_multipart()
            tasks.create_task(self._answer(router, sender, frames))

    async def _answer(self, router: zmq.asyncio.Socket, sender: bytes, request: Sequence[bytes]) -> None:
        number = request[0] if request else b""
        try:
            reply, frames = await self._handle(request)
            payload = self._encode(reply)
        except Exception as error:
            stopped = f"the server has stopped: {type(error).__name__}: {error}"
            told = error if isinstance(error, AsyncmoeError) else InvariantBroken(stopped)
            await self._send(router, sender, number, encode(_refused(told)))
            if isinstance(told, InvariantBroken):
                raise
        else:
            await self._send(router, sender, number, payload, *frames)

    async def _handle(self, request: Sequence[bytes]) -> tuple[Reply, list[Buffer]]:
        if len(request) != 2:
            raise ProtocolError(f"request: got {len(request)} frames, expected 2")
        answer = await self._handler(decode_request(request[1]))
        return answer if isinstance(answer, tuple) else (answer, [])

    def _encode(self, reply: Reply) -> bytes:
        """Encode a reply, but never the same one twice in a row: every rank gets the same `Leased`, megabytes of it."""
        if self._encoded is None or self._encoded[0] is not reply:
            self._encoded = reply, encode(reply)
        return self._encoded[1]

    async def _send(self, router: zmq.asyncio.Socket, *parts: Buffer) -> None:
        if not router.closed:
            await router.send_multipart(parts, copy=False)


def _refused(error: AsyncmoeError) -> Refused:
    known = next(c for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
    return Refused(known.__name__, str(error)[:_MAX_ERROR_TEXT])


def _explain(error: zmq.ZMQError, host: str, port: int) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port {port}", got=f"in use on {host}", expected="a free port", hint="choose another, or 0 for any free one")
    return UserError(f"address {host}:{port}", got=str(error.strerror), expected="an address of this machine and a port it may open")
