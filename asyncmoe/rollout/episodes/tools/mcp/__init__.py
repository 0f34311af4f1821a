"""Tools of MCP servers: listed once before the run, and called in sessions that belong to one episode each.

A session begins with an episode's first call of one of the server's tools and ends with the episode, so what a server remembers or
writes in its session is the episode's own. `environment.tools.mcp_sessions` limits the sessions of all episodes together.

What the server or the tool refuses (a wrong argument, an error of the tool) is an observation, from which the policy learns. A server that
hangs, dies, or answers something else than MCP or too much rejects the episode: "tool_timeout", "tool_crash", "tool_flood", counted like
those of any tool.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncmoe import installed
from asyncmoe.config.loading import section
from asyncmoe.config.mcp import McpServer
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import strict_json
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, TIMEOUT, ToolError

if TYPE_CHECKING:
    from asyncmoe.rollout.episodes.tools.mcp.session import McpSession

log = logging.getLogger(__name__)
_KEY = "environment.tools.mcp"
_NOISY = ("mcp", "client", "httpx2", "httpcore2")
"""Loggers of the SDK: it logs with a traceback what it also raises, which is told once here."""


class McpTools:
    """The tools of all MCP servers of a run.

    Args:
        servers: the keys of each server by its name, as in the configuration; mappings are checked here.
        sessions: most sessions at once; a server that an episode may call counts, called or not.

    Attributes:
        runners: the tools, by the names that a model uses.

    Raises:
        ConfigError: a server cannot be started, does not answer, or offers no tool that can be called; or the package `mcp` is missing.
    """

    def __init__(self, servers: Mapping[str, McpServer | Mapping[str, Any]], sessions: int = 64) -> None:
        self.runners: dict[str, Runner] = {}
        self._current: ContextVar[_Sessions | None] = ContextVar("sessions", default=None)
        self._ending: set[asyncio.Task[None]] = set()
        if not servers:
            return
        if sessions < len(servers):
            raise ConfigError("environment.tools.mcp_sessions", got=sessions, expected=f"at least {len(servers)}, a session of each server")
        if not installed.has("mcp"):
            raise ConfigError(_KEY, got="no package mcp", expected="the extra mcp", hint=f"run: {installed.fix('mcp')}")
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._turns = asyncio.Semaphore(sessions // len(servers))
        asked = _asked({name: _checked(f"{_KEY}.{name}", keys) for name, keys in servers.items()})
        with ThreadPoolExecutor(1) as thread:  # with a loop of its own, because the caller may be inside one or outside
            for server, tools in thread.submit(asyncio.run, asked).result():
                for tool in tools:
                    made = _McpTool(server, tool, self._current)
                    if made.name in self.runners:
                        hint = (
                            f"give it another name by {_KEY}.{server.name}.prefix, or choose among its tools by {_KEY}.{server.name}.tools"
                        )
                        raise ConfigError(_KEY, got=f"two tools named {made.name}", expected="names that differ", hint=hint)
                    limits = ToolLimits(timeout_s=server.section.timeout_s, concurrency=sessions, characters=server.section.characters)
                    self.runners[made.name] = Runner(made, limits)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Give the calls inside, also of tasks that begin there, sessions of their own; those of an episode around it remain in use."""
        if not self.runners or self._current.get() is not None:
            yield
            return
        sessions = _Sessions(self._turns)
        token = self._current.set(sessions)
        try:
            yield
        finally:
            self._current.reset(token)
            # The episode does not wait for processes to end; `close` does, and the sessions' place is free only then.
            ending = asyncio.create_task(sessions.close())
            self._ending.add(ending)
            ending.add_done_callback(self._ended)

    async def close(self) -> None:
        """Wait until every session has ended."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _ended(self, ending: asyncio.Task[None]) -> None:
        self._ending.discard(ending)
        if not ending.cancelled() and (error := ending.exception()) is not None:
            log.error("a session with an MCP server did not end: %s", error)


class _Server(NamedTuple):
    """A server by its name and keys in the configuration; `mode` is how its sessions begin (`McpSession`)."""

    name: str
    section: McpServer
    mode: str = "legacy"

    def session(self) -> McpSession:
        """Return a new session."""
        from asyncmoe.rollout.episodes.tools.mcp.session import McpSession

        return McpSession(self.name, self.section, self.mode)


def _checked(key: str, given: McpServer | Mapping[str, Any]) -> McpServer:
    """Return the keys of a server. Raises ConfigError for wrong ones, and for variables that do not exist."""
    keys = given if isinstance(given, McpServer) else section(McpServer, given, key)
    if (problem := keys.problem()) is not None:
        wrong, got, expected = problem
        raise ConfigError(f"{key}.{wrong}", got=got, expected=expected)
    for wrong, name in [("token_env", keys.token_env), *(("env_from", one) for one in keys.env_from)]:
        if name is not None and name not in os.environ:
            raise ConfigError(f"{key}.{wrong}", got=f"no variable {name} in the environment", expected="it to be set", hint="export it")
    return keys


async def _asked(servers: Mapping[str, McpServer]) -> list[tuple[_Server, list[Any]]]:
    """Return the servers, each with how its sessions begin, and the tools that the configuration chooses. Raises ConfigError."""
    found = await asyncio.gather(*(_listed(_Server(name, keys)) for name, keys in servers.items()))
    return [(server, _chosen(server, tools)) for server, tools in found]


async def _listed(server: _Server) -> tuple[_Server, list[Any]]:
    session = server.session()
    try:
        await session.open()
        return server, await session.tools()
    except ToolError as error:
        if error.reason != TIMEOUT and server.mode == "legacy":
            with suppress(ConfigError):
                return await _listed(server._replace(mode="auto"))
        got = error.detail.removeprefix("error: ")
        raise ConfigError(f"{_KEY}.{server.name}", got=got, expected="an MCP server that lists its tools") from error
    finally:
        await session.close()


def _chosen(server: _Server, tools: list[Any]) -> list[Any]:
    known, chosen = [tool.name for tool in tools], server.section.tools
    if not known or not set(chosen) <= set(known):
        got = next((name for name in chosen if name not in known), "a server that lists no tool")
        raise ConfigError(f"{_KEY}.{server.name}.tools", got=got, expected=f"some of {', '.join(known)[:1000] or 'its tools'}")
    return [tool for tool in tools if not chosen or tool.name in chosen]


class _Sessions:
    """The sessions of one episode. They share one place among those that may be open, which an episode takes with its first call."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._lock = asyncio.Lock()
        self._open: dict[str, McpSession | ToolError] = {}
        self._mine = self._closed = False

    async def of(self, server: _Server) -> McpSession:
        """Return the session with a server, begun if there is none. Raises ToolError if it cannot begin, now or earlier."""
        async with self._lock:
            if not self._mine and not self._closed:
                await self._turns.acquire()
                self._mine = True
            if self._closed:
                raise ToolError(CRASH, f"error: the episode has ended, and its session with the MCP server {server.name}")
            if server.name not in self._open:
                self._open[server.name] = session = server.session()
                try:
                    await session.open()
                except ToolError as error:
                    await session.close()
                    self._open[server.name] = error
            if isinstance(found := self._open[server.name], ToolError):
                raise found
            return found

    async def close(self) -> None:
        """End the sessions, and give the place back."""
        self._closed = True
        async with self._lock:
            try:
                await asyncio.gather(*(one.close() for one in self._open.values() if not isinstance(one, ToolError)))
            finally:
                if self._mine:
                    self._turns.release()


class _McpTool:
    """See `Tool`; `call` takes the arguments as a JSON object. `current` has the sessions of the running episode."""

    def __init__(self, server: _Server, tool: Any, current: ContextVar[_Sessions | None]) -> None:
        self.name, self.description, self.parameters = f"{server.section.prefix}{tool.name}", tool.description or "", tool.input_schema
        self._server, self._name, self._current = server, tool.name, current

    async def begin(self) -> McpSession:
        """Return the episode's session with the server, begun if there is none. Raises ToolError if it cannot begin."""
        if (sessions := self._current.get()) is None:
            raise RuntimeError(f"{self.name}: got a call outside an episode, expected one inside `async with McpTools.episode()`")
        return await sessions.of(self._server)

    async def call(self, argument: str) -> str:
        """See `Tool`. Raises ToolError."""
        arguments = self._arguments(argument)
        return await (await self.begin()).call(self._name, arguments)

    async def close(self) -> None:
        """See `Tool`. Sessions end with their episodes."""

    def _arguments(self, argument: str) -> dict[str, Any]:
        """Return the arguments of a call. Text that is no JSON object is the value of the tool's only parameter."""
        try:
            given = json.loads(argument)
        except (ValueError, RecursionError):
            given = None
        properties = self.parameters.get("properties") or {}
        if not isinstance(given, dict):
            if len(properties) != 1:
                raise ToolError(ERROR, f"error: the arguments of {self.name} are a JSON object")
            ((name, schema),) = properties.items()
            text = isinstance(schema, dict) and schema.get("type") == "string"
            given = {name: argument if text or given is None else given}
        try:
            strict_json.checked(given)
        except ValueError as error:
            raise ToolError(ERROR, f"error: arguments of {self.name} that are not valid JSON: {error}") from error
        return given


def merged(own: Mapping[str, Runner], mcp: Mapping[str, Runner], style: str) -> dict[str, Runner]:
    """Return the tools of a configuration and those of its MCP servers.

    Raises:
        ConfigError: two have the same name, or a name cannot be written in a call of this style.
    """
    for name in mcp:
        if name in own:
            got = f"a tool named {name}, like one of environment.tools.names"
            raise ConfigError(_KEY, got=got, expected="names that differ", hint="give it another name by the server's prefix")
        if style == "brackets" and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            expected = "letters, digits and underscores, because environment.tools.style is brackets"
            raise ConfigError(_KEY, got=f"a tool named {name}", expected=expected, hint="use hermes, or leave it out by the server's tools")
    return {**own, **mcp}
