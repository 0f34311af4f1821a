"""POST requests to one server whose replies are read with one copy: from the socket into the buffer that they stay in.

Answers of `/generate` are nearly all that a rollout process receives, half a megabyte and more each with routes. A general HTTP client
reads a reply in pieces, copies each out of its parser, and joins them. Here a reply is what SGLang's server sends: HTTP/1.1 with a
Content-Length. Connections stay open for the next request; anything unexpected on one closes it.

An event loop wakes for every few packets, and uvloop then reads a socket until it is empty. Here the kernel wakes the loop only once much
of a long body is there (SO_RCVLOWAT, socket(7)); a short one is read as it arrives, while it is in the processor's cache. When a turn of
the loop has taken long enough, the rest is read in the next.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import numpy as np

from asyncmoe.engines.turnstile import turnstile

HEAD_BYTES = 1 << 13
"""Bound on the status line and headers of a reply."""
MOST_BYTES = 1 << 32
"""Bound on the body of a reply. Memory is taken as bytes arrive."""
_AT_ONCE = 1 << 19
"""Bytes read at once, and of which the loop is told at once."""
_LITTLE = 1 << 12
"""Bytes read at once when the turn of the loop is full."""
_END = b"\r\n\r\n"


@dataclass(frozen=True)
class HttpReply:
    """A reply: its status, its Content-Type in lower case and without parameters, and its body."""

    status: int
    kind: str
    body: memoryview


@dataclass(frozen=True)
class ReplyHead:
    """The beginning of a reply: its status, Content-Type and Content-Length, and whether the connection stays open."""

    status: int
    kind: str
    size: int
    kept: bool


def read_head(text: bytes) -> ReplyHead:
    """Read a status line and headers.

    Raises:
        ConnectionError: they are not those of an HTTP/1.1 reply with one Content-Length of at most `MOST_BYTES`.
    """
    first, *lines = text.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not _digits(status) or rest[3:4] not in ("", " ") or int(status) < 200:
        raise ConnectionError(f"got a reply that begins with {first[:80]!r}, expected HTTP/1.1 and a status")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name == "content-length" and name in headers):
            raise ConnectionError(f"got the header {line[:80]!r} in a reply, expected each once, with a name and a value")
        headers[name] = value.strip()
    size = headers.get("content-length", "")
    if "transfer-encoding" in headers or not _digits(size) or int(size) > MOST_BYTES:
        length = headers.get("transfer-encoding", size)[:80]
        raise ConnectionError(f"got a reply of length {length!r}, expected a Content-Length of at most {MOST_BYTES}")
    kept = version == "HTTP/1.1" and headers.get("connection", "keep-alive").lower() == "keep-alive"
    return ReplyHead(int(status), headers.get("content-type", "").partition(";")[0].strip().lower(), int(size), kept)


def _digits(text: str) -> bool:
    return 0 < len(text) < 20 and text.isascii() and text.isdigit()


class _Connection(asyncio.BufferedProtocol):
    """One connection, for one request at a time.

    Args:
        every: the connections that are open, this one among them as long as it is.

    Attributes:
        kept: whether another request can follow.
        since: when the last one ended, in seconds of the event loop's clock.
    """

    def __init__(self, every: set[_Connection]) -> None:
        self.kept, self.since, self._every, self._turnstile = True, 0.0, every, turnstile()
        self._first = np.empty(HEAD_BYTES, np.uint8).data
        self._head: ReplyHead | None = None
        self._body = self._first
        self._got = 0
        self._told_at = 1  # the socket's SO_RCVLOWAT
        self._reply: asyncio.Future[HttpReply] | None = None

    async def ask(self, request: bytes) -> HttpReply:
        """Send a request; return its reply. Raises ConnectionError. If it is cancelled, the connection is closed."""
        if not self.kept:
            raise ConnectionError("the connection was closed")
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._reply
        except BaseException:
            self.close(ConnectionError("the request was given up"))
            raise

    def close(self, why: ConnectionError) -> None:
        """Close the connection; a request that waits raises `why`."""
        self.kept = False
        self._transport.abort()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(why)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._every.add(self)
        self._socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body[self._got : self._got + (_LITTLE if self._turnstile.full() else _AT_ONCE)]

    def buffer_updated(self, nbytes: int) -> None:
        if self._reply is None or self._reply.done():
            self.close(ConnectionError("got bytes that belong to no request"))
            return
        self._got += nbytes
        try:
            if self._head is None:
                self._begin(self._reply, max(self._got - nbytes - len(_END) + 1, 0))
            elif self._got == self._head.size:
                self._finish(self._reply, self._head)
        except ConnectionError as error:
            self.close(error)
        else:
            self._wait_for_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._every.discard(self)
        self.close(ConnectionError(f"the server closed the connection{f': {exc}' if exc else ''}"))

    def _wait_for_more(self) -> None:
        """Have the kernel tell of the next bytes once enough are there, and none be read in this turn of the loop if it is full."""
        rest = 0 if self._head is None or self._head.size <= _AT_ONCE else self._head.size - self._got
        at = min(rest, _AT_ONCE) or 1
        if at != self._told_at and self.kept:
            with suppress(OSError):  # only saves turns of the loop; a filter of system calls may refuse it
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at)
            self._told_at = at
        if self._head is not None and self._turnstile.full():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _begin(self, reply: asyncio.Future[HttpReply], searched: int) -> None:
        """Read the head once all of it is there, and take what follows it."""
        text = bytes(self._first[: self._got])
        end = text.find(_END, searched)
        if end < 0:
            if self._got == HEAD_BYTES:
                raise ConnectionError(f"got no end of the headers of a reply within {HEAD_BYTES} bytes")
            return
        head, rest = read_head(text[:end]), text[end + len(_END) :]
        if len(rest) > head.size:
            raise ConnectionError(f"got {len(rest)} bytes of a reply, expected {head.size}")
        self._head, self._body, self._got = head, np.empty(head.size, np.uint8).data, len(rest)
        self._body[: len(rest)] = rest
        if self._got == head.size:
            self._finish(reply, head)

    def _finish(self, reply: asyncio.Future[HttpReply], head: ReplyHead) -> None:
        made = HttpReply(head.status, head.kind, self._body.toreadonly())
        self._head, self._body, self._got = None, self._first, 0
        self.kept, self.since = head.kept, asyncio.get_running_loop().time()
        reply.set_result(made)
        if not head.kept:
            self._transport.close()


class KeptConnections:
    """Connections to one server.

    Args:
        url: "http://host:port".
        headers: sent with every request.
        idle_s: an idle connection is closed after this time.

    Raises:
        ValueError: the URL has another form, or a header has characters outside Latin-1.
    """

    def __init__(self, url: str, headers: Mapping[str, str], idle_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.port is None:
            raise ValueError(f"url: got {url!r}, expected http://host:port")
        self._host, self._port, self._idle_s = parts.hostname, parts.port, idle_s
        fixed = "".join(f"{name}: {value}\r\n" for name, value in ({"Host": parts.netloc} | dict(headers)).items())
        self._fixed = fixed.encode("latin-1")
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self.closed = False

    async def post(self, path: str, body: bytes, seconds: float) -> HttpReply:
        """Send a request; return its reply.

        Raises:
            TimeoutError: there was none after so many seconds.
            ConnectionError: the connection failed, or the reply is of another form.
        """
        head = f"POST {path} HTTP/1.1\r\n".encode() + self._fixed + f"Content-Length: {len(body)}\r\n\r\n".encode()
        async with asyncio.timeout(seconds):
            connection = self._take() or await self._connect()
            reply = await connection.ask(head + body)
        if connection.kept:
            self._idle.append(connection)
            self._sweep_later()
        return reply

    def close(self) -> None:
        """Close all connections; requests in flight raise ConnectionError."""
        self.closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._all):
            connection.close(ConnectionError("the connections are closed"))
        self._idle.clear()

    async def _connect(self) -> _Connection:
        try:
            _, made = await asyncio.get_running_loop().create_connection(lambda: _Connection(self._all), self._host, self._port)
        except OSError as error:
            raise ConnectionError(f"cannot connect to {self._host}:{self._port}: {error}") from error
        if self.closed:
            made.close(ConnectionError("the connections are closed"))
        return made

    def _take(self) -> _Connection | None:
        """Return the idle connection that was used last, if it is fresh."""
        oldest = asyncio.get_running_loop().time() - self._idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.kept and connection.since > oldest:
                return connection
            connection.close(ConnectionError("the connection was idle"))
        return None

    def _sweep_later(self) -> None:
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(self._idle_s, self._sweep)

    def _sweep(self) -> None:
        """Close the connections that have been idle for long."""
        self._sweeping, oldest = None, asyncio.get_running_loop().time() - self._idle_s
        for connection in self._idle:
            if connection.since <= oldest:
                connection.close(ConnectionError("the connection was idle"))
        self._idle = [connection for connection in self._idle if connection.kept]
        if self._idle:
            self._sweep_later()
