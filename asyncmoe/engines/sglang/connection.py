"""HTTP requests to one SGLang 0.5.23 server (`sglang.srt.entrypoints.http_server`): each waits a bounded time, and succeeds or raises."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, TypeVar

import aiohttp
import msgspec

from asyncmoe.engines.types import EngineLost
from asyncmoe.errors import EngineError, WaitTimeout

T = TypeVar("T")
KEEP_ALIVE_S = 5.0
"""The client closes idle connections long before the engine would: a request sent just as the engine closes one is lost."""
_READ_BYTES = 1 << 20
"""Bytes of an answer that may wait unread before TCP stalls its connection: an answer with routes has half a megabyte or more."""
_FAILURES = (aiohttp.ClientError, OSError, ValueError)
"""What a request raises if there is no connection, or something other than HTTP on it; ValueError: an invalid address or key."""


class SGLangConnection:
    """Connections to one engine's endpoints.

    Args:
        name: name of the engine in errors.
        url: "http://host:port".
        key: API key the engine requires; empty: none.
        timeout_s: limit on every call without its own timeout.
    """

    def __init__(self, name: str, url: str, key: str = "", timeout_s: float = 60.0) -> None:
        self.name, self.url, self.key, self._timeout_s = name, url, key, timeout_s

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Created by the first call, because it belongs to that call's event loop."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        # The engine queues requests it cannot run yet, so a limit on connections would only hide requests from it.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        return aiohttp.ClientSession(headers=headers, connector=connector, read_bufsize=_READ_BYTES)

    async def close(self) -> None:
        """Close the connections; the engine cancels the requests in flight."""
        await self._session.close()

    async def _ok(self, path: str, seconds: float) -> bool:
        """Return whether a GET gets a complete answer with status 200. Never raises."""
        try:
            async with self._session.get(self.url + path, timeout=aiohttp.ClientTimeout(seconds)) as reply:
                await reply.read()
                return reply.status == 200
        except (*_FAILURES, RuntimeError):  # RuntimeError: the session was closed
            return False

    async def _post(self, path: str, body: Mapping[str, Any] | None, kind: type[T], timeout_s: float | None = None) -> T:
        """As `_send`, with the answer decoded. Raises EngineError if it does not decode."""
        text = await self._send(path, body, timeout_s)
        try:
            return msgspec.json.decode(text, type=kind)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.name}: {path}: unexpected answer: {error}") from error

    async def _send(self, path: str, body: Mapping[str, Any] | None, timeout_s: float | None = None) -> bytes:
        """POST a body, or GET without one; return the answer's body. Its status alone says whether the engine has done it."""
        async with self._requested(path, body, timeout_s or self._timeout_s) as reply:
            return await reply.read()

    async def _stream(self, path: str, body: Mapping[str, Any], seconds: float) -> AsyncGenerator[bytes]:
        """POST a body; yield the answer's body as it arrives. Leaving early closes the connection, which cancels the request."""
        async with self._requested(path, body, seconds) as reply:
            async for piece in reply.content.iter_any():
                yield piece

    @asynccontextmanager
    async def _requested(
        self, path: str, body: Mapping[str, Any] | None, seconds: float, accept: str = "application/json"
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request for an answer of one of the media types in `accept`; within the block, convert failures to engine errors.

        Raises:
            WaitTimeout: the block did not end within `seconds`.
            EngineLost: the connection failed or broke off, what arrived is not HTTP, or the client was closed, as a fenced engine's is,
                even if a task is about to call it.
            EngineError: the status is not 200.
        """
        if self._session.closed:
            raise EngineLost(f"{self.name}: {path}: its connections are closed")
        method, data, limit = "GET" if body is None else "POST", msgspec.json.encode(body), aiohttp.ClientTimeout(seconds)
        try:
            async with self._session.request(
                method, self.url + path, data=None if body is None else data, headers={"Accept": accept}, timeout=limit
            ) as reply:
                if reply.status != 200:
                    raise EngineError(f"{self.name}: {path}: {_message(await reply.read())}")
                yield reply
        except TimeoutError as error:
            raise WaitTimeout(self.name, path, seconds) from error
        except _FAILURES as error:
            raise EngineLost(f"{self.name}: {path}: {error or type(error).__name__}") from error


def _message(text: bytes) -> str:
    """Return the error message in an answer: {"error": {"message": ...}}, {"message": ...}, {"error_message": ...} or plain text."""
    try:
        answer = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text.decode(errors="replace").strip()[:500]
    if isinstance(answer, dict):
        inner = answer.get("error")
        answer = inner.get("message", answer) if isinstance(inner, dict) else answer.get("message", answer.get("error_message", answer))
    return str(answer)[:500]
