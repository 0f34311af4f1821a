"""The HTTP client for the SDK's streamable HTTP: bounded answers, and a note of what failed.

The SDK turns every failure into a JSON-RPC error. Only a note taken here tells a server that is down from one that refuses a call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import httpx2

from asyncmoe.rollout.episodes.tools.mcp.process import MAX_BYTES
from asyncmoe.rollout.episodes.tools.tool import CRASH, FLOOD
from asyncmoe.surroundings import proxy_for

_JSON, _EVENTS = "application/json", "text/event-stream"
_TOO_MUCH = f"more than {MAX_BYTES} bytes in one answer"


class Noted(httpx2.AsyncBaseTransport):  # type: ignore[misc]  # the package may be absent
    """Sends requests to one URL, and bounds and notes what comes back.

    Attributes:
        fault: reason and detail (`ToolError`) of the first failure; None: there was none.
    """

    def __init__(self, url: str) -> None:
        self.fault: tuple[str, str] | None = None
        self._inner = httpx2.AsyncHTTPTransport(proxy=proxy_for(url))  # a client that is given a transport asks for no proxy itself

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; see `httpx2.AsyncBaseTransport`."""
        # A compressed answer could grow beyond its bound after it was counted.
        request.headers["Accept-Encoding"] = "identity"
        try:
            response = await self._inner.handle_async_request(request)
        except httpx2.TransportError as error:
            if request.method == "POST":
                self.note(CRASH, str(error) or type(error).__name__)
            raise
        if request.method == "POST":
            self._look(response)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        # The other stream is of notifications, and may break without harm.
        response.stream = _Bounded(response.stream, self.note if request.method == "POST" else _forgotten)
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    def note(self, reason: str, detail: str) -> None:
        """Keep the first failure."""
        self.fault = self.fault or (reason, detail)

    def _look(self, response: httpx2.Response) -> None:
        """Note an answer that is not of the protocol. A JSON error with a status such as 400 is."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        status = response.status_code
        encoded = response.headers.get("content-encoding", "identity").lower()
        if status >= 500 or (status >= 400 and kind != _JSON) or status == 404:
            self.note(CRASH, f"status {status}")
        elif status < 300 and status != 202 and kind not in (_JSON, _EVENTS):
            self.note(CRASH, f"got an answer of type {kind or 'none'}, expected {_JSON} or {_EVENTS}")
        elif encoded != "identity":
            self.note(CRASH, f"got an answer encoded as {encoded}, which was not asked for")
            raise httpx2.RemoteProtocolError("an encoded answer")


class _Bounded(httpx2.AsyncByteStream):  # type: ignore[misc]
    def __init__(self, inner: httpx2.AsyncByteStream, note: Callable[[str, str], None]) -> None:
        self._inner, self._note = inner, note

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._inner:
                size += len(chunk)
                if size > MAX_BYTES:
                    self._note(FLOOD, _TOO_MUCH)
                    raise httpx2.StreamError(_TOO_MUCH)
                yield chunk
        except httpx2.TransportError as error:
            self._note(CRASH, str(error) or type(error).__name__)
            raise

    async def aclose(self) -> None:
        await self._inner.aclose()


def _forgotten(reason: str, detail: str) -> None:
    """Note nothing."""
