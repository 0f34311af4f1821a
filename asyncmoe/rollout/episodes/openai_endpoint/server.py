"""The HTTP server of all episodes of a rollout worker, on the loopback interface."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from aiohttp import ClientConnectionResetError, web

from asyncmoe.rollout.async_tasks import cancelled
from asyncmoe.rollout.episodes.environment import Episode
from asyncmoe.rollout.episodes.openai_endpoint import chat
from asyncmoe.rollout.episodes.openai_endpoint.messages import MessagesApi
from asyncmoe.rollout.episodes.openai_endpoint.parameters import Api
from asyncmoe.rollout.episodes.openai_endpoint.request import CompletionRequest, RequestRefused, event
from asyncmoe.rollout.episodes.openai_endpoint.session import CHAT, MESSAGES, RESPONSES, Session
from asyncmoe.rollout.episodes.tools.calls import HERMES

log = logging.getLogger(__name__)
PATH = "asyncmoe-path"
"""Header of an answer that is not streamed: the name of its path, by which an agent may reward it."""
OVERRIDDEN = "asyncmoe-overridden"
"""Header of an answer: the names of request parameters that the run's own sampling overrides."""

BODY_BYTES = 8 << 20
"""Maximum body of one request."""
_HOST = "127.0.0.1"
_SHUTDOWN_S = 1.0
ALIVE_S = 15.0
"""Seconds between keep-alive comments to a client that waits for a stream."""


class OpenAIEndpoint:
    """One server for all episodes, which tells them apart by their API keys. It starts with the first episode.

    Args:
        style: as `environment.tools.style`.
    """

    def __init__(self, style: str = HERMES) -> None:
        self._style = style
        self._told: set[str] = set()
        self._sessions: dict[str, Session] = {}
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def open(self, episode: Episode) -> tuple[Session, str]:
        """Open an endpoint for an episode.

        Returns:
            The episode's session, and its base URL for clients of OpenAI; clients of Anthropic may use it too.
        """
        async with self._starting:
            if self._runner is None:
                await self._start()
        session = Session(episode, self._style)
        self._sessions[session.key] = session
        return session, f"http://{_HOST}:{self._port}/v1"

    async def end(self, session: Session) -> None:
        """Close the endpoint of an episode, and end its requests."""
        self._sessions.pop(session.key, None)
        await session.close()

    async def close(self) -> None:
        """Stop the server."""
        for session in list(self._sessions.values()):
            await self.end(session)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> None:
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[_tell])
        for version in ("/v1", "/v1/v1"):  # Anthropic's clients add "v1" to their base URL
            app.router.add_post(f"{version}/{{api:{CHAT}|{RESPONSES}|{MESSAGES}}}", self._answer)
            app.router.add_post(f"{version}/{MESSAGES}/count_tokens", self._count)
        app.router.add_get("/v1/models", self._models)
        # If a client disconnects, its handler is cancelled, and with it the request to the engine.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        await web.TCPSite(runner, _HOST, 0).start()
        self._runner, self._port = runner, runner.addresses[0][1]

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response(chat.models())

    async def _count(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked, _ = session.parse(session.apis[MESSAGES], await request.read())
        return web.json_response({"input_tokens": session.count(asked)})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        api = session.apis[request.match_info["api"]]
        asked, overridden = session.parse(api, await request.read())
        self._tell_overridden(overridden)
        headers = {OVERRIDDEN: ", ".join(overridden)} if overridden else {}
        if asked.stream:
            return await _stream(request, session, api, asked, headers)
        answer = await session.answer(asked)
        return web.json_response(api.whole(asked, answer), headers={**headers, PATH: answer.path})

    def _tell_overridden(self, names: Sequence[str]) -> None:
        """Log each overridden parameter once in a run."""
        if new := [name for name in names if name not in self._told]:
            self._told.update(new)
            log.warning("an agent sets %s, which the run's sampling or chat template ignores; this is logged once", ", ".join(new))

    def _session(self, request: web.Request) -> Session:
        """Return the session that a request is for.

        Raises:
            RequestRefused: 401: no episode has the key.
        """
        # Some clients send a key of their own in one header, and the configured key in the other header.
        given = (request.headers.get("Authorization", "").removeprefix("Bearer "), request.headers.get("x-api-key", ""))
        session = next((self._sessions[key] for key in given if key in self._sessions), None)
        if session is None:
            raise RequestRefused(401, "no episode has this key", code="invalid_api_key")
        return session


@web.middleware
async def _tell(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Return errors in the form of the client's API, marked as not retryable: clients would retry some, but every retry fails as well."""
    try:
        return await handler(request)
    except RequestRefused as error:
        refused = error
    except web.HTTPException as error:
        refused = RequestRefused(error.status, error.text or error.reason)
    # Errors for unknown paths are in OpenAI's form.
    api: Api = MessagesApi() if request.path.rstrip("/").endswith((f"/{MESSAGES}", "/count_tokens")) else chat.ChatApi()
    return web.json_response(api.error(refused), status=refused.status, headers={"x-should-retry": "false"})


async def _stream(
    request: web.Request, session: Session, api: Api, asked: CompletionRequest, headers: dict[str, str]
) -> web.StreamResponse:
    """Answer with server-sent events, all at once when the response is sampled: only then is it known whether its text is a call. A request
    that fails soon gets an ordinary error; during a long one, comments keep the connection alive."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    answering = asyncio.create_task(session.answer(asked))
    try:
        while not (await asyncio.wait((answering,), timeout=ALIVE_S))[0]:
            await _write(request, response, b": sampling\n\n")
        made = api.events(asked, await answering)
    except RequestRefused as refused:
        if not response.prepared:
            raise
        made = event(api.error(refused))
    finally:
        await cancelled([answering])
    await _write(request, response, made)
    return response  # aiohttp ends it, unless the client has left


async def _write(request: web.Request, response: web.StreamResponse, content: bytes) -> None:
    # A client that disconnects cancels the handler, but only once the bytes for it are sent or lost: until then, writing raises.
    with suppress(ClientConnectionResetError):
        if not response.prepared:
            await response.prepare(request)
        await response.write(content)
