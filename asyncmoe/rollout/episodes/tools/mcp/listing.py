"""Asks every MCP server for its tools, once before the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.mcp.server import KEY, McpToolServer
from asyncmoe.rollout.episodes.tools.mcp.session import McpSession
from asyncmoe.rollout.episodes.tools.tool import ERROR, ToolError

_SCHEMA_BYTES = 65536
_NAME_CHARACTERS = 128


@dataclass(frozen=True)
class Listed:
    """A tool as its server lists it; `parameters` is its JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]


def listed(servers: Sequence[McpToolServer]) -> list[tuple[McpToolServer, list[Listed]]]:
    """Return the servers, each with how its sessions begin, and their tools.

    In a thread with a loop of its own, because the caller may be inside one or outside.
    """

    async def every() -> list[tuple[McpToolServer, list[Listed]]]:
        return list(await asyncio.gather(*(_ask(server) for server in servers)))

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, every()).result()


async def _ask(server: McpToolServer) -> tuple[McpToolServer, list[Listed]]:
    try:
        return server, _offered(server, await _tools(server))
    except ToolError as error:
        if error.reason != ERROR:
            raise _unusable(server, error) from error
    other = replace(server, mode="auto")
    try:
        return other, _offered(other, await _tools(other))
    except ToolError as error:
        raise _unusable(server, error) from error


async def _tools(server: McpToolServer) -> list[Any]:
    session = McpSession(server)
    try:
        await session.open()
        return await session.tools()
    finally:
        await session.close()


def _unusable(server: McpToolServer, error: ToolError) -> ConfigError:
    told = " ".join(error.detail.removeprefix("error: ").removeprefix(f"the MCP server {server.name}: ").split())
    return ConfigError(f"{KEY}.{server.name}", got=told, expected="an MCP server that lists its tools")


def _offered(server: McpToolServer, tools: Sequence[Any]) -> list[Listed]:
    """Return the tools that the configuration chooses, checked."""
    key, section = f"{KEY}.{server.name}", server.section
    known = [str(tool.name) for tool in tools]
    if unknown := [name for name in section.tools if name not in known]:
        raise ConfigError(f"{key}.tools", got=unknown[0], expected=f"some of {', '.join(known)[:1000] or 'nothing: it lists no tool'}")
    chosen = [tool for tool in tools if not section.tools or tool.name in section.tools]
    if not chosen:
        raise ConfigError(key, got="a server that lists no tool", expected="at least one tool")
    for tool in chosen:
        if not 0 < len(tool.name) <= _NAME_CHARACTERS or not tool.name.isprintable() or tool.name != tool.name.strip():
            raise ConfigError(key, got=f"a tool named {tool.name[:60]!r}", expected=f"1 to {_NAME_CHARACTERS} printable characters")
        size = len(json.dumps(tool.input_schema)) + len(tool.description or "")
        if size > _SCHEMA_BYTES:
            expected = f"at most {_SCHEMA_BYTES}, because the policy's prompt may hold them"
            raise ConfigError(key, got=f"{size} characters of description and schema of {tool.name}", expected=expected)
    return [Listed(tool.name, (tool.description or "").strip(), dict(tool.input_schema)) for tool in chosen]
