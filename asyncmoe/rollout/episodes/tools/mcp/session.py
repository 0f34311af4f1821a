"""One session with one MCP server, using the clients of the official SDK (the package `mcp`).

The SDK's contexts must be left by the task that entered them, and calls come from many tasks, so each session lives in a task of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import httpx2
import mcp_types as types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from asyncmoe.config.mcp import McpServer
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, ToolError
from asyncmoe.surroundings import proxy_for

log = logging.getLogger(__name__)
MODES = ("legacy", "auto")
"""How a session begins, the SDK's `Client.mode`: "legacy" calls `initialize`; "auto" is for servers that refuse this call."""
_LEAVE_S, _CLOSE_S = 10.0, 30.0
_LAST_WORDS_S = 0.2
_SHOWN = 400
_RESERVED = range(-32768, -31999)
"""Error codes of JSON-RPC and MCP itself; all other codes are a server's own."""
T = TypeVar("T")


class McpSession:
    """One session, begun by the first call of `begun`. `close` may be called from any task, at any time.

    Args:
        name, section: the server's name and keys in the configuration.
        mode: one of `MODES`.
    """

    def __init__(self, name: str, section: McpServer, mode: str) -> None:
        self._name, self._section, self._mode = name, section, mode
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed with the session

    async def begun(self) -> Client:
        """Wait until the session has begun.

        Raises:
            ToolError: `CRASH`: the session did not begin within `start_timeout_s`, or the server cannot be started or reached, ended, or
                answered something that is not MCP; `ERROR`: the server refuses. No second attempt is made.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._live(), name=f"mcp {self._name}")
        return await self._answered(asyncio.shield(self._client), "begin a session")

    async def tools(self) -> list[types.Tool]:
        """Return the tools that the server lists. Raises ToolError as `begun` does."""
        client = await self.begun()

        async def pages() -> list[types.Tool]:
            found, cursor = list[types.Tool](), None
            async with asyncio.timeout(self._section.start_timeout_s):
                while True:
                    page = await client.session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
                    found += page.tools
                    if (cursor := page.next_cursor) is None:
                        return found

        return await self._answered(pages(), "list its tools")

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its answer as text. The caller limits the time.

        Raises:
            ToolError: `ERROR`: the tool or the server refuses the call; contains its message; `CRASH`: the server has ended or does not
                answer with a tool's result.
        """
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=arguments))
        # Not `call_tool`, which lists all tools once per session to check the result against a schema useful only to programs.
        asked = (await self.begun()).session.send_request(request, types.CallToolResult)
        result = await self._answered(asked, f"answer a call of {tool}")
        text = "\n".join(map(_shown, result.content))
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(ERROR, text or "error: the tool failed without a word")
        return text

    async def close(self) -> None:
        """End the session, and the server's processes, if any. Failure to end is only logged."""
        self._closing.set()
        if self._task is not None:
            if self._client.cancel():  # it has not begun
                self._task.cancel()
            for seconds in (_LEAVE_S, _CLOSE_S):
                if (await asyncio.wait([self._task], timeout=seconds))[0]:
                    return self._stderr.close()
                self._task.cancel()  # a remote server need not answer the goodbye
            log.error("the MCP server %s has not ended its session within %g s", self._name, _CLOSE_S)

    async def _live(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._section.start_timeout_s):
                    client = await stack.enter_async_context(Client(self._transport(), mode=self._mode, cache=None))
                self._client.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001  whatever the SDK raises is the server's failure, passed to the waiters
            if not self._client.done():
                self._client.set_exception(_leaf(error))
                self._client.exception()  # retrieves the exception: nobody may be waiting any more

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        """Yield the two message streams of an SDK client."""
        section = self._section
        if section.url is not None:
            headers = {} if section.token_env is None else {"Authorization": f"Bearer {os.environ[section.token_env]}"}
            # Calls have deadlines of their own, and the stream of notifications is silent for as long as the server likes.
            timeout = httpx2.Timeout(section.start_timeout_s, read=None)
            client = httpx2.AsyncClient(headers=headers, timeout=timeout, proxy=proxy_for(section.url), trust_env=False)
            async with client, streamable_http_client(section.url, http_client=client) as streams:
                yield streams
            return
        assert section.command is not None
        environment = {name: os.environ[name] for name in section.env_from} | section.env
        started = StdioServerParameters(command=section.command, args=list(section.args), env=environment, cwd=section.cwd)
        async with stdio_client(started, self._stderr) as streams:
            yield streams

    async def _answered(self, request: Awaitable[T], what: str) -> T:
        """Return the answer to a request. Raises ToolError; its reason depends on whose fault the failure is."""
        try:
            return await request
        except Exception as error:  # whatever the SDK raises is the server's failure
            if isinstance(error, MCPError) and (error.code == types.INVALID_PARAMS or error.code not in _RESERVED):
                raise ToolError(ERROR, f"error: {error.message}") from error
            late = isinstance(error, TimeoutError)
            told = f"did not {what}: {error or type(error).__name__}"
            if late:
                told = f"took longer than {self._section.start_timeout_s:g} s to {what}"
            await asyncio.sleep(_LAST_WORDS_S)  # its last words arrive by another pipe
            if not self._stderr.closed:
                self._stderr.seek(0)
                told += "".join(f"; it said: {words}" for words in self._stderr.read().strip().splitlines()[-1:])
            detail = f"error: the MCP server {self._name} {' '.join(told.split())[:_SHOWN]}"
            raise ToolError(CRASH, detail) from error


def _shown(block: types.ContentBlock) -> str:
    """Return the text of a part of a result; for other content, its kind and address."""
    inner = getattr(block, "resource", block)
    if (text := getattr(inner, "text", None)) is not None:
        return str(text)
    return f"[{': '.join(map(str, filter(None, (inner.mime_type or block.type, getattr(inner, 'uri', None)))))}]"


def _leaf(error: BaseException) -> BaseException:
    """Return the first error of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
