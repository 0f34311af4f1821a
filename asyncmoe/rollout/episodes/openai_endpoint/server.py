"""The HTTP server of all episodes of a controller, on the loopback interface."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from asyncmoe.rollout.episodes.environment import Episode
from asyncmoe.rollout.episodes.openai_endpoint import protocol
from asyncmoe.rollout.episodes.openai_endpoint.protocol import RequestRefused
from asyncmoe.rollout.episodes.openai_endpoint.session import Session

_HOST = "127.0.0.1"
_BODY_S = 30.0
_SHUTDOWN_S = 1.0
_NOBODY = secrets.token_urlsafe(32)


@dataclass(frozen=True)
class ClientLimits:
    """Limits on a client's requests.

    Attributes:
        body_bytes: maximum body size of one request.
        requests: maximum number of requests of one episode, failed requests included.
    """

    body_bytes: int = 8 * 2**20
    requests: int = 1000


class OpenAIEndpoint:
    """One server for all episodes; each has a URL and an API key of its own. The server starts with the first episode."""

    def __init__(self, limits: ClientLimits | None = None) -> None:
        self._limits = limits or ClientLimits()
        self._sessions: dict[str, Session] = {}
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def open(self, episode: Episode) -> tuple[Session, str]:
        """Open an endpoint for an episode.

        Returns:
            The episode's session, and its base URL for OpenAI's clients.
        """
        async with self._starting:
            if self._runner is None:
                await self._start()
        session = Session(episode)
        self._sessions[session.name] = session
        return session, f"http://{_HOST}:{self._port}/{session.name}/v1"

    async def end(self, session: Session) -> None:
        """Close the endpoint of an episode, and end its requests."""
        self._sessions.pop(session.name, None)
        await session.close()

    async def close(self) -> None:
        """Stop the server."""
        for session in list(self._sessions.values()):
            await self.end(session)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> None:
        app = web.Application(client_max_size=self._limits.body_bytes, middlewares=[_tell])
        app.router.add_post("/{name}/v1/chat/completions", self._completions)
        app.router.add_get("/{name}/v1/models", self._models)
        # If a client disconnects, its handler is cancelled, and with it the request to the engine.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        await web.TCPSite(runner, _HOST, 0).start()
        self._runner, self._port = runner, runner.addresses[0][1]

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response(protocol.models())

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            async with asyncio.timeout(_BODY_S):
                body = await request.read()
        except TimeoutError as error:
            raise RequestRefused(408, f"the body did not arrive within {_BODY_S:g} s") from error
        asked = session.parse(body)
        answer = await session.answer(asked)
        if not asked.stream:
            return web.json_response(protocol.completion(asked, answer))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in protocol.chunks(asked, answer):
            await response.write(chunk)
        await response.write_eof()
        return response

    def _session(self, request: web.Request) -> Session:
        """Return the session that a request is for.

        Raises:
            RequestRefused: 401: no such episode, or the wrong key. 429: too many requests.
        """
        session = self._sessions.get(request.match_info["name"])
        expected = f"Bearer {session.key if session else _NOBODY}"
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), expected.encode()) or session is None:
            raise RequestRefused(401, "no such episode, or the wrong key", code="invalid_api_key")
        session.requests += 1
        if session.requests > self._limits.requests:
            raise RequestRefused(429, f"more than {self._limits.requests} requests in one episode", code="too_many_requests")
        return session


@web.middleware
async def _tell(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Return errors in OpenAI's form, marked as not retryable: its clients would retry some, but every retry fails the same way."""
    try:
        return await handler(request)
    except RequestRefused as error:
        refused = error
    except web.HTTPException as error:
        refused = RequestRefused(error.status, error.text or error.reason)
    return web.json_response(refused.body(), status=refused.status, headers={"x-should-retry": "false"})
