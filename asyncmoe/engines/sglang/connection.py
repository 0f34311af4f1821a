"""HTTP requests to one SGLang 0.5.23 server (`sglang.srt.entrypoints.http_server`): each waits a bounded time, and succeeds or raises."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from asyncmoe.engines.sglang.replies import HttpReply, KeptConnections
from asyncmoe.engines.types import EngineLost
from asyncmoe.errors import EngineError, WaitTimeout
from asyncmoe.platform.sglang.packed_answers import MEDIA_TYPE

T = TypeVar("T")
KEEP_ALIVE_S = 5.0
"""The client closes idle connections long before the engine would, because a request sent just as the engine closes is lost."""


class Acknowledged(msgspec.Struct, frozen=True):
    """The answer of an endpoint that only succeeds or fails."""

    success: bool = True
    message: str = ""


class SGLangConnection:
    """Connections to one engine's endpoints.

    Args:
        name: name of the engine in errors.
        url: "http://host:port".
        key: API key the engine requires; empty: none.
        timeout_s: limit on every call without a timeout of its own.

    Raises:
        EngineError: the URL or the key cannot be one.
    """

    def __init__(self, name: str, url: str, key: str = "", timeout_s: float = 60.0) -> None:
        self.name, self.url, self.key, self._timeout_s = name, url, key, timeout_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        asked = {"Content-Type": "application/json", "Accept": f"{MEDIA_TYPE}, application/json"}
        try:
            self._answers = KeptConnections(url, headers | asked, KEEP_ALIVE_S)
        except ValueError as error:
            raise EngineError(f"{name}: {error}") from error
        # The engine queues requests it cannot run yet, so a limit on connections would only hide requests from it.
        self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S))

    async def close(self) -> None:
        """Close the connections; the engine cancels the requests in flight."""
        self._answers.close()
        await self._session.close()

    async def _post(self, path: str, body: Mapping[str, Any], kind: type[T], timeout_s: float | None = None) -> T:
        text = await self._send(path, body, timeout_s or self._timeout_s)
        try:
            return msgspec.json.decode(text, type=kind)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.name}: {path}: unexpected answer: {error}") from error

    async def _ask(self, path: str, body: Mapping[str, Any], seconds: float) -> HttpReply:
        """POST a body whose answer is large; return it, packed if the engine can."""
        self._check_open(path)
        try:
            reply = await self._answers.post(path, msgspec.json.encode(body), seconds)
        except TimeoutError as error:
            raise WaitTimeout(self.name, path, seconds) from error
        except ConnectionError as error:
            raise EngineLost(f"{self.name}: {path}: {error}") from error
        if reply.status != 200:
            raise EngineError(f"{self.name}: {path}: {_message(bytes(reply.body))}")
        return reply

    async def _send(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> bytes:
        """POST a body, or GET without one; return the answer's body."""
        self._check_open(path)
        headers = {"Content-Type": "application/json"}
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=aiohttp.ClientTimeout(seconds)
            ) as reply:
                status, text = reply.status, await reply.read()
        except TimeoutError as error:
            raise WaitTimeout(self.name, path, seconds) from error
        except aiohttp.ClientError as error:
            raise EngineLost(f"{self.name}: {path}: {error or type(error).__name__}") from error
        if status != 200:
            raise EngineError(f"{self.name}: {path}: {_message(text)}")
        return text

    async def _stream(self, path: str, body: Mapping[str, Any], seconds: float) -> AsyncGenerator[bytes]:
        """POST a body; yield the answer's body as it arrives. Leaving early closes the connection, which cancels the request."""
        self._check_open(path)
        try:
            data, headers, timeout = msgspec.json.encode(body), {"Content-Type": "application/json"}, aiohttp.ClientTimeout(seconds)
            async with self._session.post(self.url + path, data=data, headers=headers, timeout=timeout) as reply:
                if reply.status != 200:
                    raise EngineError(f"{self.name}: {path}: {_message(await reply.read())}")
                async for piece in reply.content.iter_any():
                    yield piece
        except TimeoutError as error:
            raise WaitTimeout(self.name, path, seconds) from error
        except aiohttp.ClientError as error:
            raise EngineLost(f"{self.name}: {path}: {error or type(error).__name__}") from error

    def _check_open(self, path: str) -> None:
        """Raise EngineLost after `close`: whoever fences an engine closes its client, while others may be about to call it."""
        if self._session.closed:
            raise EngineLost(f"{self.name}: {path}: its connections are closed")


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
