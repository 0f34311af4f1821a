"""One session with one MCP server, over the official SDK (the package `mcp`).

The SDK's contexts must be left by the task that entered them, and calls come from many tasks, so each session lives in a task of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio
import httpx2
import mcp_types as types
from mcp import Client, MCPError
from mcp.shared.message import SessionMessage

from asyncmoe.errors import WaitTimeout
from asyncmoe.rollout.episodes.tools.mcp.http import Noted
from asyncmoe.rollout.episodes.tools.mcp.process import MAX_BYTES, ServerProcess
from asyncmoe.rollout.episodes.tools.mcp.server import McpToolServer
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, FLOOD, TIMEOUT, ToolError

_PAGES = 100
_TOOLS = 512
_LEAVE_S, _CLOSE_S = 5.0, 30.0
_T = TypeVar("_T")


class McpSession:
    """One session. `open`, then `tools` and `call`, then `close`, which may be called from any task and at any time."""

    def __init__(self, server: McpToolServer) -> None:
        self._server = server
        self._connection: _Process | _Http = _Http(server) if server.section.url is not None else _Process(server)
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin the session.

        Raises:
            ToolError: `TIMEOUT`: not within `start_timeout_s`; `CRASH`: the server cannot be started or reached, ended, or answered
                something that is not MCP; `FLOOD`: it wrote too much; `ERROR`: it refuses this way to begin.
        """
        self._task = asyncio.create_task(self._run(), name=f"mcp {self._server.name}")
        seconds = self._server.section.start_timeout_s
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._client)
        except TimeoutError as error:
            raise ToolError(TIMEOUT, self._said(f"took longer than {seconds:g} s to begin a session")) from error
        except Exception as error:
            raise await self._failed(error) from error

    async def tools(self) -> list[types.Tool]:
        """Return the tools that the server lists. Raises ToolError as `open` does."""
        seconds = self._server.section.start_timeout_s
        try:
            async with asyncio.timeout(seconds):
                return await self._while_open(self._list(self._client.result()))
        except TimeoutError as error:
            raise ToolError(TIMEOUT, self._said(f"took longer than {seconds:g} s to list its tools")) from error

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its answer as text. The caller limits the time.

        Raises:
            ToolError: `ERROR`: the tool or the server refuses the call, with its words; `CRASH`: the server has ended or does not answer
                with a tool's result; `FLOOD`: it wrote too much.
        """
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=arguments))
        try:
            request.model_dump_json(by_alias=True)
        except ValueError as error:
            # Nested too deeply for the SDK, which would end the session or blame the server.
            raise ToolError(ERROR, f"error: the arguments of {tool} cannot be sent: {error}") from error
        client = self._client.result()
        # Not `call_tool`, which lists all tools once a session to compare the result with a schema that only a program could use.
        result = await self._while_open(client.session.send_request(request, types.CallToolResult))
        text = text_of(result)
        if result.is_error:
            raise ToolError(ERROR, text or "error: the tool failed without a word")
        return text

    async def close(self) -> None:
        """End the session, and the server's process if it has one.

        Raises:
            WaitTimeout: the session did not end.
        """
        self._closing.set()
        if self._task is None:
            return
        if not self._client.done():
            self._task.cancel()
        for seconds in (_LEAVE_S, _CLOSE_S):
            done, _ = await asyncio.wait([self._task], timeout=seconds)
            if done:
                return
            self._task.cancel()  # a server that runs elsewhere need not answer the goodbye
        raise WaitTimeout(f"the MCP server {self._server.name}", "end its session", _CLOSE_S)

    async def _run(self) -> None:
        try:
            async with Client(self._connection.transport(), mode=self._server.mode, cache=None) as client:
                self._client.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001  whatever the SDK raises is the server's failure, told to those who wait
            if not self._client.done():
                self._client.set_exception(_leaf(error))
                self._client.exception()  # nobody may wait any more

    async def _list(self, client: Client) -> list[types.Tool]:
        found: list[types.Tool] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = await client.session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if len(found) > _TOOLS:
                raise ToolError(FLOOD, self._said(f"lists more than {_TOOLS} tools"))
            if cursor is None:
                return found
        raise ToolError(FLOOD, self._said(f"lists its tools on more than {_PAGES} pages"))

    async def _while_open(self, request: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a request, or raise as soon as the session ends."""
        assert self._task is not None
        asking = asyncio.create_task(request)
        try:
            await asyncio.wait([asking, self._task], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
        except ToolError:
            raise
        except Exception as error:
            raise await self._failed(error) from error
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        raise await self._failed(ConnectionError("the session has ended"))

    async def _failed(self, error: Exception) -> ToolError:
        """Return the error for a request that failed, by whose fault it was."""
        await self._connection.settle()
        fault = self._connection.fault
        if fault is not None:
            return ToolError(fault[0], self._said(fault[1]))
        if isinstance(error, MCPError) and error.code not in (types.CONNECTION_CLOSED, types.PARSE_ERROR, types.REQUEST_TIMEOUT):
            return ToolError(ERROR, f"error: {error.message}")
        if isinstance(error, MCPError | ConnectionError) or not isinstance(error, ValueError | RuntimeError):
            return ToolError(CRASH, self._said(str(error) or type(error).__name__))
        return ToolError(CRASH, self._said(f"answered what is no MCP: {' '.join(str(error).split())[:200]}"))

    def _said(self, what: str) -> str:
        state = self._connection.state()
        return f"error: the MCP server {self._server.name}: {what}{f'; it {state}' if state else ''}"


class _Process:
    """A connection over the standard streams of a command."""

    def __init__(self, server: McpToolServer) -> None:
        section = server.section
        assert section.command is not None
        self._process = ServerProcess(server.name, (section.command, *section.args), server.environment, section.cwd)
        self._opened = False

    @property
    def fault(self) -> tuple[str, str] | None:
        return self._process.fault

    def state(self) -> str:
        return self._process.state() if self._opened else ""

    async def settle(self) -> None:
        if self._opened:
            await self._process.settled()

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[Any]:
        """Yield the two streams that the SDK reads and writes."""
        await self._process.open()
        self._opened = True
        arriving, arrived = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        leaving, left = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [asyncio.create_task(self._read(arriving)), asyncio.create_task(self._write(left, arriving))]
        try:
            yield arrived, leaving
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (arriving, arrived, leaving, left):
                stream.close()
            await asyncio.shield(self._process.close())

    async def _read(self, arriving: Any) -> None:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async with arriving:
                async for line in self._process.lines():
                    try:
                        message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:
                        self._process.note_rubbish(line)
                        continue
                    await arriving.send(SessionMessage(message))

    async def _write(self, left: Any, arriving: Any) -> None:
        try:
            async for message in left:
                await self._process.send(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode())
        except (ConnectionError, ValueError):
            # The server has closed its input, or a message cannot be written; requests that wait would wait for ever.
            await arriving.aclose()


class _Http:
    """A connection over streamable HTTP."""

    def __init__(self, server: McpToolServer) -> None:
        self._server = server
        self._noted = Noted(str(server.section.url))

    @property
    def fault(self) -> tuple[str, str] | None:
        return self._noted.fault

    def state(self) -> str:
        return ""

    async def settle(self) -> None:
        """A failure is noted before it is raised."""

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[Any]:
        """Yield the two streams that the SDK reads and writes."""
        from mcp.client.streamable_http import streamable_http_client

        section, token = self._server.section, self._server.token
        assert section.url is not None
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # Calls have deadlines of their own, and the stream of notifications is silent for as long as the server likes.
        timeout = httpx2.Timeout(section.start_timeout_s, read=None)
        async with httpx2.AsyncClient(headers=headers, timeout=timeout, transport=self._noted) as client:
            connection: AbstractAsyncContextManager[Any] = streamable_http_client(
                section.url, http_client=client, max_sse_event_size=MAX_BYTES
            )
            async with connection as streams:
                yield streams


def text_of(result: types.CallToolResult) -> str:
    """Return the text of a tool's result; what is not text is named, not shown."""
    parts = [_shown(block) for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _shown(block: types.ContentBlock) -> str:
    if isinstance(block, types.TextContent):
        return str(block.text)
    if isinstance(block, types.EmbeddedResource):
        inner = block.resource
        return str(inner.text) if isinstance(inner, types.TextResourceContents) else f"[{inner.mime_type or 'binary'}: {inner.uri}]"
    if isinstance(block, types.ResourceLink):
        return f"[{block.name}: {block.uri}]"
    return f"[{block.mime_type}, {len(block.data) * 3 // 4} bytes]"


def _leaf(error: BaseException) -> BaseException:
    """Return the first error of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
