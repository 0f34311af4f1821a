"""The HTTP server of all episodes of a controller, on loopback."""

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
    """Of what a client may ask.

    Attributes:
        body_bytes: of one request.
        requests: of one episode, failed ones included.
    """

    body_bytes: int = 8 * 2**20
    requests: int = 1000


class OpenAIEndpoint:
    """One server; every episode has a URL and a key of its own. It starts with the first episode."""

    def __init__(self, limits: ClientLimits | None = None) -> None:
        self._limits = limits or ClientLimits()
        self._sessions: dict[str, Session] = {}
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def open(self, episode: Episode) -> tuple[Session, str]:
        """Let an episode be spoken to.

        Returns:
            It, and its base URL, as OpenAI's clients take it.
        """
        async with self._starting:
            if self._runner is None:
                await self._start()
        session = Session(episode)
        self._sessions[session.name] = session
        return session, f"http://{_HOST}:{self._port}/{session.name}/v1"

    async def end(self, session: Session) -> None:
        """Let nobody speak to it any more."""
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
        # A handler ends when its client has gone: so does the request to the engine.
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
        """The episode a request is for.

        Raises:
            Refused: 401: no such episode, or the wrong key. 429: too many requests.
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
    """Errors in OpenAI's form. Its clients would repeat some of them; none would end otherwise the second time."""
    try:
        return await handler(request)
    except RequestRefused as error:
        refused = error
    except web.HTTPException as error:
        refused = RequestRefused(error.status, error.text or error.reason)
    return web.json_response(refused.body(), status=refused.status, headers={"x-should-retry": "false"})
