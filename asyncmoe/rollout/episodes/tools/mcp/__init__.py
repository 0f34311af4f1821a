"""Tools of MCP servers: listed once before the run, and called in sessions that belong to one episode each.

A session begins with an episode's first call of one of the server's tools and ends with the episode, so a server's state in its session
belongs to that episode alone. `environment.tools.mcp_sessions` limits the sessions of all episodes together.

An error of the server or the tool (such as a wrong argument) is an observation, from which the policy learns; so are, unless the
configuration says otherwise, a call that takes too long and an answer that is too large. A server that dies or violates MCP causes the
episode's rejection ("tool_crash").
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncmoe import installed
from asyncmoe.config.loading import section
from asyncmoe.config.mcp import McpServer
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.async_tasks import begun
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.tools.tool import CRASH, ToolError, variable

if TYPE_CHECKING:
    from asyncmoe.rollout.episodes.tools.mcp.session import McpSession

_KEY = "environment.tools.mcp"
_NOISY = ("mcp", "client", "httpx2", "httpcore2")
"""Loggers of the SDK: it logs, with a traceback, errors that it also raises; they are reported once, here."""


class McpTools:
    """The tools of all MCP servers of a run.

    Args:
        servers: the keys of each server by its name, as in the configuration; mappings are checked here.
        sessions: maximum sessions at once; each episode counts one for every server, called or not.
        own: tools that no server provides.

    Attributes:
        runners: all tools, by the names that a model uses.

    Raises:
        ConfigError: a server cannot be started, does not answer, or offers no tool; two tools have the same name; or the package `mcp`
            is missing.
    """

    def __init__(
        self, servers: Mapping[str, McpServer | Mapping[str, Any]], sessions: int = 64, own: Mapping[str, Runner] | None = None
    ) -> None:
        self.runners: dict[str, Runner] = dict(own or {})
        self._current: ContextVar[_Episode | None] = ContextVar("episode", default=None)
        self._ending: set[asyncio.Task[None]] = set()
        self._places: asyncio.Semaphore | None = None
        if not servers:
            return
        if sessions < len(servers):
            raise ConfigError("environment.tools.mcp_sessions", got=sessions, expected=f"at least {len(servers)}, one for each server")
        if not installed.has("mcp"):
            raise ConfigError(_KEY, got="no package mcp", expected="the extra mcp", hint=f"run: {installed.fix('mcp')}")
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._places = asyncio.Semaphore(sessions // len(servers))
        known = {name: _checked(f"{_KEY}.{name}", keys) for name, keys in servers.items()}
        with ThreadPoolExecutor() as threads:  # with their own loops, because the caller may already be inside one
            found = list(threads.map(lambda name: asyncio.run(_listed(name, known[name])), known))
        for (name, keys), (make, tools) in zip(known.items(), found, strict=True):
            limits = ToolLimits(timeout_s=keys.timeout_s, concurrency=sessions, characters=keys.characters)
            session = partial(self._session, name, make)
            for tool in tools:
                called, call = f"{keys.prefix}{tool.name}", partial(_call, session, tool.name)
                if called in self.runners:
                    hint = "rename it with the server's key prefix, or select tools with its key tools"
                    raise ConfigError(f"{_KEY}.{name}", got=f"two tools named {called}", expected="names that differ", hint=hint)
                self.runners[called] = Runner(called, tool.description or "", tool.input_schema, call, limits, begin=session)

    async def _session(self, name: str, make: Callable[[], McpSession]) -> McpSession:
        """Return the running episode's session with a server; begin one if there is none. Raises ToolError if it cannot begin."""
        if (episode := self._current.get()) is None:
            raise RuntimeError(f"{name}: got a call outside an episode, expected one inside `async with McpTools.episode()`")
        return await episode.session(name, make)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Give calls within the block, and in tasks started there, their own sessions. An inner block uses those of the outer one."""
        if self._places is None or self._current.get() is not None:
            yield
            return
        episode = _Episode(self._places)
        token = self._current.set(episode)
        try:
            yield
        finally:
            self._current.reset(token)
            # The episode does not wait for processes to end; `close` does, and frees the sessions' slot only then.
            begun(episode.close(), self._ending)

    async def close(self) -> None:
        """Wait until every session has ended."""
        await asyncio.gather(*self._ending, return_exceptions=True)


async def _call(session: Callable[[], Awaitable[McpSession]], tool: str, arguments: Mapping[str, Any]) -> str:
    return await (await session()).call(tool, dict(arguments))


def _checked(key: str, given: McpServer | Mapping[str, Any]) -> McpServer:
    """Return the keys of a server. Raises ConfigError for wrong keys, and for variables that are not set."""
    keys = section(McpServer, given, key)
    for one in keys.env_from:
        variable(f"{key}.env_from", one)
    if keys.token_env is not None:
        variable(f"{key}.token_env", keys.token_env)
    return keys


async def _listed(name: str, keys: McpServer) -> tuple[Callable[[], McpSession], list[Any]]:
    """Return a factory of sessions with a server, and the tools that its keys choose. Raises ConfigError."""
    from asyncmoe.rollout.episodes.tools.mcp.session import MODES, McpSession

    failed: ToolError | None = None
    for mode in MODES:
        make = partial(McpSession, name, keys, mode)
        session = make()
        try:
            tools = await session.tools()
        except ToolError as error:
            failed = failed or error
            if isinstance(error.__cause__, TimeoutError):
                break
            continue
        finally:
            await session.close()
        known = [tool.name for tool in tools]
        if not known or not set(keys.tools) <= set(known):
            got = next((one for one in keys.tools if one not in known), "a server that lists no tool")
            raise ConfigError(f"{_KEY}.{name}.tools", got=got, expected=f"some of {', '.join(known)[:1000] or 'its tools'}")
        return make, [tool for tool in tools if not keys.tools or tool.name in keys.tools]
    assert failed is not None
    got = failed.detail.removeprefix("error: ")
    raise ConfigError(f"{_KEY}.{name}", got=got, expected="an MCP server that lists its tools") from failed


class _Episode:
    """The sessions of one episode. They share one slot of the semaphore, which the episode takes at its first call."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places, self._lock = places, asyncio.Lock()
        self._sessions: dict[str, McpSession] = {}
        self._closed = False

    async def session(self, name: str, make: Callable[[], McpSession]) -> McpSession:
        """Return the session with a server; begin one if there is none. Raises ToolError if it could not begin."""
        async with self._lock:
            if self._closed:
                raise ToolError(CRASH, f"error: the episode and its session with the MCP server {name} have ended")
            if not self._sessions:
                await self._places.acquire()
            session = self._sessions[name] = self._sessions.get(name) or make()
        await session.begun()
        return session

    async def close(self) -> None:
        """End the sessions and release the slot."""
        async with self._lock:
            self._closed = True
            try:
                await asyncio.gather(*(session.close() for session in self._sessions.values()))
            finally:
                if self._sessions:
                    self._places.release()
