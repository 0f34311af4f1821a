"""Tools of MCP servers: listed once before the run, and called in sessions that belong to one episode each.

A session begins with an episode's first call of one of the server's tools and ends with the episode, so what a server remembers or
writes in its session is the episode's own. `environment.tools.mcp_sessions` limits the sessions of all episodes together.

What the server or the tool refuses (a wrong argument, an unknown name, an error of the tool) is an observation, from which the policy
learns. A server that hangs, dies, answers something else than MCP or too much rejects the episode: "tool_timeout", "tool_crash",
"tool_flood", counted like those of any tool.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from asyncmoe import installed
from asyncmoe.config.loading import section
from asyncmoe.config.mcp import McpServer
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import strict_json
from asyncmoe.rollout.episodes.tools.mcp.server import KEY, McpToolServer, resolve
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, ToolError

if TYPE_CHECKING:
    from asyncmoe.rollout.episodes.tools.mcp.listing import Listed
    from asyncmoe.rollout.episodes.tools.mcp.session import McpSession

log = logging.getLogger(__name__)
_NOISY = ("mcp", "client", "httpx2", "httpcore2")
"""Loggers of the SDK: it logs with a traceback what it also raises, which is told once here."""


class McpTools:
    """The tools of all MCP servers of a run.

    Args:
        servers: the keys of each server by its name, as in the configuration; mappings are checked here.
        sessions: most sessions at once; a server that an episode may call counts, called or not.

    Attributes:
        runners: the tools, by the names that a model uses.
        keys: the key of each tool's server in the configuration, by the same names.

    Raises:
        ConfigError: a server cannot be started, does not answer, or offers no tool that can be called; or the package `mcp` is missing.
    """

    def __init__(self, servers: Mapping[str, McpServer | Mapping[str, Any]], sessions: int = 64) -> None:
        self.runners: dict[str, Runner] = {}
        self.keys: dict[str, str] = {}
        self._current: ContextVar[_Sessions | None] = ContextVar("sessions", default=None)
        self._ending: set[asyncio.Task[None]] = set()
        if not servers:
            return
        if sessions < len(servers):
            raise ConfigError("environment.tools.mcp_sessions", got=sessions, expected=f"at least {len(servers)}, a session of each server")
        reached = [resolve(name, keys) for name, keys in _sections(servers).items()]
        if not installed.has("mcp"):
            raise ConfigError(KEY, got="no package mcp", expected="the extra mcp", hint=f"run: {installed.fix('mcp')}")
        from asyncmoe.rollout.episodes.tools.mcp.listing import listed

        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._turns = asyncio.Semaphore(sessions // len(servers))
        for server, tools in listed(reached):
            self._add(server, tools, sessions)

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

    def _add(self, server: McpToolServer, tools: Sequence[Listed], sessions: int) -> None:
        keys = server.section
        for tool in tools:
            limits = ToolLimits(keys.timeout_s, sessions, keys.characters)
            runner = _Runner(_McpTool(server, tool, self._current), limits)
            if runner.name in self.runners:
                hint = f"give it another name by {KEY}.{server.name}.prefix, or choose among its tools by {KEY}.{server.name}.tools"
                raise ConfigError(KEY, got=f"two tools named {runner.name}", expected="names that differ", hint=hint)
            self.runners[runner.name] = runner
            self.keys[runner.name] = f"{KEY}.{server.name}"


def _sections(servers: object) -> dict[str, McpServer]:
    """Return the keys of each server, checked. Raises ConfigError."""
    if not isinstance(servers, Mapping):
        raise ConfigError(KEY, got=repr(servers), expected="a mapping of servers by name")
    return {name: one if isinstance(one, McpServer) else section(McpServer, one, f"{KEY}.{name}") for name, one in servers.items()}


class _Sessions:
    """The sessions of one episode. They share one place among those that may be open, which an episode takes with its first call."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._lock = asyncio.Lock()
        self._open: dict[str, McpSession | ToolError] = {}
        self._mine = self._closed = False

    async def of(self, server: McpToolServer) -> McpSession:
        """Return the session with a server, begun if there is none. Raises ToolError if it cannot begin, now or earlier."""
        from asyncmoe.rollout.episodes.tools.mcp.session import McpSession

        async with self._lock:
            if not self._mine:
                await self._turns.acquire()
                self._mine = True
                if self._closed:
                    self._turns.release()
            if self._closed:
                raise ToolError(CRASH, f"error: the episode has ended, and its session with the MCP server {server.name}")
            if server.name not in self._open:
                session = McpSession(server)
                self._open[server.name] = session
                try:
                    await session.open()
                except ToolError as error:
                    await session.close()
                    self._open[server.name] = _beyond(error)
            found = self._open[server.name]
            if isinstance(found, ToolError):
                raise found
            return found

    def begun(self, server: McpToolServer) -> McpSession:
        """Return the session with a server, which `of` has begun."""
        found = self._open[server.name]
        assert not isinstance(found, ToolError)
        return found

    async def close(self) -> None:
        """End the sessions, and give the place back."""
        self._closed = True
        sessions = [one for one in self._open.values() if not isinstance(one, ToolError)]
        try:
            await asyncio.gather(*(session.close() for session in sessions))
        finally:
            if self._mine:
                self._turns.release()


class _McpTool:
    """See `Tool`; `call` takes the arguments as a JSON object. `current` has the sessions of the running episode."""

    def __init__(self, server: McpToolServer, tool: Listed, current: ContextVar[_Sessions | None]) -> None:
        self.name, self.description, self.parameters = f"{server.section.prefix}{tool.name}", tool.description, tool.parameters
        self._server, self._name, self._current = server, tool.name, current

    async def begin(self) -> None:
        """Begin the episode's session with the server, if there is none. Raises ToolError if it cannot begin."""
        await self._sessions().of(self._server)

    async def call(self, argument: str) -> str:
        """See `Tool`. Raises ToolError."""
        arguments = self._arguments(argument)
        return await self._sessions().begun(self._server).call(self._name, arguments)

    async def close(self) -> None:
        """See `Tool`. Sessions end with their episodes."""

    def _sessions(self) -> _Sessions:
        sessions = self._current.get()
        if sessions is None:
            raise RuntimeError(f"{self.name}: got a call outside an episode, expected one inside `async with McpTools.episode()`")
        return sessions

    def _arguments(self, argument: str) -> dict[str, Any]:
        """Return the arguments of a call. Text that is no JSON object is the value of the tool's only parameter."""
        try:
            given = json.loads(argument)
        except (ValueError, RecursionError):
            given = None
        made = self._made(argument, given)
        try:
            strict_json.checked(made)
        except ValueError as error:
            raise ToolError(ERROR, f"error: arguments of {self.name} that are not valid JSON: {error}") from error
        return made

    def _made(self, argument: str, given: object) -> dict[str, Any]:
        if isinstance(given, dict):
            return given
        properties = self.parameters.get("properties")
        if isinstance(properties, dict) and len(properties) == 1:
            ((name, schema),) = properties.items()
            text = isinstance(schema, dict) and schema.get("type") == "string"
            return {name: argument if text or given is None else given}
        raise ToolError(ERROR, f"error: the arguments of {self.name} are a JSON object")


class _Runner(Runner):
    """Begins the session before a call, so that the call's time does not count the server's start."""

    def __init__(self, tool: _McpTool, limits: ToolLimits) -> None:
        super().__init__(tool, limits)
        self._begin = tool.begin

    async def call(self, argument: str) -> str:
        """See `Runner`. Raises ToolError also if the session cannot begin."""
        begin = time.perf_counter()
        try:
            await self._begin()
        except ToolError as error:
            self._count(begin, error.reason)
            raise
        return await super().call(argument)


def check_options(options: Mapping[str, Mapping[str, Any]] | None, keys: Mapping[str, str]) -> None:
    """Refuse options of tools that are a server's, whose keys are `keys`.

    Raises:
        ConfigError: there are such options.
    """
    for name, given in (options or {}).items():
        if (key := keys.get(name)) is not None:
            meant = " and ".join(f"{key}.{option}" for option in given if option in McpServer.model_fields)
            hint = f"set {meant}" if meant else None
            raise ConfigError(
                f"environment.tools.options.{name}", got="a tool of an MCP server", expected=f"its limits in {key}", hint=hint
            )


def merged(own: Mapping[str, Runner], mcp: Mapping[str, Runner], style: str) -> dict[str, Runner]:
    """Return the tools of a configuration and those of its MCP servers.

    Raises:
        ConfigError: two have the same name, or a name cannot be written in a call of this style.
    """
    for name in mcp:
        if name in own:
            got = f"a tool named {name}, like one of environment.tools.names"
            raise ConfigError(KEY, got=got, expected="names that differ", hint="give it another name by the server's prefix")
        if style == "brackets" and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            expected = "letters, digits and underscores, because environment.tools.style is brackets"
            raise ConfigError(KEY, got=f"a tool named {name}", expected=expected, hint="use hermes, or leave it out by the server's tools")
    return {**own, **mcp}


def _beyond(error: ToolError) -> ToolError:
    """Return the error for calls of a server whose session cannot begin: also a refusal is no tool's answer then."""
    return ToolError(CRASH if error.reason == ERROR else error.reason, error.detail)
