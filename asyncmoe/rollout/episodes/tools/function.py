"""A user's own function as a tool: `package.module:function`, from text or typed parameters to text (`signature`).

A coroutine function runs in the controller's loop and must not block it. A plain function runs in worker processes
(`asyncmoe.rollout.episodes.tools.function_worker`), because it may hang or hold the interpreter; a process whose call is cancelled is
killed.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import cast

from asyncmoe.errors import WaitTimeout
from asyncmoe.rollout import reaped
from asyncmoe.rollout.episodes.tools.signature import Arguments, find
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, Tool, ToolError

_START_S = 60.0
_LINE_BYTES = 16 * 2**20


def load(target: str) -> Tool:
    """Make a tool of a function, with the function's name, and its docstring as the description.

    Raises:
        ConfigError: no such function, or one with parameters that a call cannot give.
    """
    function = find(target)
    name = getattr(function, "__name__", target.rpartition(":")[2])
    arguments = Arguments(function, target)
    if inspect.iscoroutinefunction(function):
        return AsyncFunction(name, arguments)
    return InProcesses(name, arguments, target)


class AsyncFunction:
    """A coroutine function, all calls of which run concurrently."""

    def __init__(self, name: str, arguments: Arguments) -> None:
        self.name, self.description, self.parameters = name, arguments.description, arguments.parameters
        self.takes_json = arguments.takes_json
        self._arguments = arguments

    async def call(self, argument: str) -> str:
        """Call the function and return its result.

        Raises:
            ToolError: the function's own, or `ERROR` for any other exception.
        """
        try:
            return cast(str, await self._arguments.call(argument))
        except ToolError:
            raise
        except Exception as error:
            raise ToolError(ERROR, f"error: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """See `Tool`."""


class InProcesses:
    """A plain function in worker processes, one per running call; idle processes are kept for later calls."""

    def __init__(self, name: str, arguments: Arguments, target: str) -> None:
        self.name, self.description, self.parameters = name, arguments.description, arguments.parameters
        self.takes_json = arguments.takes_json
        self._target = target
        self._idle: list[asyncio.subprocess.Process] = []

    async def call(self, argument: str) -> str:
        """Call the function and return its result.

        Raises:
            ToolError: the function's own. `ERROR`: it raised another exception. `CRASH`: it ended its process, answered too many bytes, or
                returned something that is not text.
            WaitTimeout: a process did not start.
        """
        process = self._idle.pop() if self._idle else await self._start()
        try:
            answer = await self._exchange(process, argument)
        except BaseException:
            # Otherwise the answer to this call would be read as the answer to the next.
            await self._end(process)
            raise
        self._idle.append(process)
        if "error" in answer:
            raise ToolError(str(answer["reason"]), str(answer["error"]))
        text = answer["text"]
        if not isinstance(text, str):
            raise ToolError(CRASH, f"error: {self.name} answered something that is not text")
        return text

    async def close(self) -> None:
        """See `Tool`."""
        while self._idle:
            await self._end(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "asyncmoe.rollout.episodes.tools.function_worker", self._target)
        process = await reaped.start(command, _LINE_BYTES)
        try:
            async with asyncio.timeout(_START_S):
                await self._exchange(process, None)
        except BaseException as error:
            await self._end(process)
            if isinstance(error, TimeoutError):
                raise WaitTimeout(f"a process of the tool {self.name}", "start", _START_S) from error
            raise
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        await reaped.end(process, f"a process of the tool {self.name}")

    async def _exchange(self, process: asyncio.subprocess.Process, argument: str | None) -> dict[str, object]:
        try:
            return cast(dict[str, object], await reaped.exchange(process, argument))
        except reaped.Broken as error:
            raise ToolError(CRASH, f"error: the process of {self.name} {error}") from error
