"""The controller's server: concurrent requests, one reply to each.

A request is two frames, its number and a msgpack message; a reply is the number, a message and the frames it announces. The client chooses
the number and the server echoes it, so a late reply cannot be taken for a reply to another request. Every request runs as its own task: a
request that waits (`Lease`, `EnginesAsk`) blocks no other.

An `AsyncmoeError` is answered with `Refused`. An `InvariantBroken` or any other exception is a fault of this side and ends `serve` with
that exception: the run stops rather than continue with a broken queue.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from asyncmoe import errors
from asyncmoe.errors import AsyncmoeError, InvariantBroken, ProtocolError, UserError
from asyncmoe.rpc import environment, keys, local
from asyncmoe.rpc.codec import MAX_FRAME_BYTES, decode_request, encode
from asyncmoe.rpc.environment import ANY, CONTROLLER, RendezvousVariables
from asyncmoe.rpc.messages import Refused, Reply, Request
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.scratch import Scratch
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
        advertise: host name that clients connect to; by default `host`, or this machine's name if `host` is 0.0.0.0.
        given: address and secret from the environment, in place of `host`, `port`, `advertise` and random keys.
        here_only: serve clients on this host alone, over the Unix socket, and listen on no port.
        max_frame_bytes: a client that sends a larger frame is disconnected before the frame is read.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        given: RendezvousVariables | None = None,
        here_only: bool = False,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._handler, self._host, self._port, self._given = handler, host, port, given
        self._advertise = advertise or (socket.gethostname() if host in (ANY, "*") else host)
        self._max_frame_bytes, self._here_only = max_frame_bytes, here_only
        self._keys = keys.generate() if given is None else keys.derive(given.secret)
        if given is not None:
            self._host, self._port, self._advertise = environment.listen_on(given.host), given.port, given.host
        # ZeroMQ allows one authentication handler per context, so the server has its own context.
        self._context = zmq.asyncio.Context(_IO_THREADS)
        self._sockets: list[zmq.asyncio.Socket] = []
        self._encoded: tuple[Reply, bytes] | None = None
        self._local: Scratch | None = None
        self._authenticator: AsyncioAuthenticator | None = None

    async def start(self) -> Rendezvous:
        """Bind, and return the rendezvous for `asyncmoe.rpc.keys.write`, which passes it to clients. No request is answered before `serve`.

        Raises:
            UserError: the port is in use, or the address does not belong to this machine.
        """
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _OnlyKey(self._keys.client_public))
        self._authenticator.configure_plain("*", {local.USER: self._keys.local_secret})
        if not self._here_only:
            await self._listen()
        here = self._router()
        here.plain_server = True
        self._local = local.make()
        here_address = local.address(self._local.path)
        here.bind(here_address)
        address = here_address if self._here_only else f"tcp://{self._advertise}:{self._port}"
        return keys.rendezvous(address, self._keys, str(self._local.path))

    async def _listen(self) -> None:
        remote = self._router()
        remote.curve_server = True
        remote.curve_secretkey = self._keys.server_secret
        try:
            remote.bind(f"tcp://{self._host}:{self._port}")
        except zmq.ZMQError as error:
            await self.close()
            raise _explain(error, self._host, self._port, self._given) from error
        self._port = int(remote.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def serve(self) -> None:
        """Answer requests until cancelled.

        Raises:
            Exception: the handler's exception, if it is an `InvariantBroken` or not an `AsyncmoeError`. All other requests are cancelled.
        """
        if not self._sockets:
            raise InvariantBroken("serve before start")
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
        """Close the sockets. Replies already written have one second to leave."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        while self._sockets:
            self._sockets.pop().close(_LINGER_MS)
        await asyncio.to_thread(self._context.term)
        if self._local is not None:
            self._local.remove()
            self._local = None

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def _router(self) -> zmq.asyncio.Socket:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.MAXMSGSIZE, self._max_frame_bytes)
        # A ROUTER with a full send buffer drops replies silently. Clients send one request at a time, which already bounds the buffer.
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
        except InvariantBroken as error:
            await self._send(router, sender, number, encode(_refused(error)))
            raise
        except AsyncmoeError as error:
            payload, frames = encode(_refused(error)), []
        except Exception as error:
            broken = InvariantBroken(f"the controller has stopped: {type(error).__name__}: {error}")
            await self._send(router, sender, number, encode(_refused(broken)))
            raise
        await self._send(router, sender, number, payload, *frames)

    async def _handle(self, request: Sequence[bytes]) -> tuple[Reply, list[Buffer]]:
        if len(request) != 2:
            raise ProtocolError(f"request: got {len(request)} frames, expected 2")
        answer = await self._handler(decode_request(request[1]))
        return answer if isinstance(answer, tuple) else (answer, [])

    def _encode(self, reply: Reply) -> bytes:
        """Encode a reply, but not twice in a row: every rank gets the same `Leased`, megabytes of it."""
        if self._encoded is None or self._encoded[0] is not reply:
            self._encoded = reply, encode(reply, self._max_frame_bytes)
        return self._encoded[1]

    async def _send(self, router: zmq.asyncio.Socket, *parts: Buffer) -> None:
        if not router.closed:
            await router.send_multipart(parts, copy=False)


class _OnlyKey:
    """Admits the holder of one public key; the authenticator calls it with the key that a client has proved to hold."""

    def __init__(self, allowed: bytes) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._allowed


def _refused(error: AsyncmoeError) -> Refused:
    known = next(c for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
    return Refused(known.__name__, str(error)[:_MAX_ERROR_TEXT])


def _explain(error: zmq.ZMQError, host: str, port: int, given: RendezvousVariables | None) -> UserError:
    if given is not None:
        where = f"{given.address} ({host} on {socket.gethostname()})"
        if error.errno == errno.EADDRINUSE:
            hint = "stop the other controller of this run if it has the port, or choose another port"
            return UserError(CONTROLLER, got=f"{where}, which is in use", expected="a free port", hint=hint)
        hint = "start the controller on the machine it names"
        return UserError(CONTROLLER, got=f"{where}: {error.strerror}", expected="an address of this machine", hint=hint)
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port {port}", got=f"in use on {host}", expected="a free port", hint="choose another, or 0 for any free one")
    return UserError(f"address {host}:{port}", got=str(error.strerror), expected="an address of this machine and a port it may open")
