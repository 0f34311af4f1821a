"""Runs a tool under limits, and counts its calls."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncmoe import plugins
from asyncmoe.config.fields import Positive, Seconds, Section
from asyncmoe.rollout.episodes.tools.tool import CRASH, FLOOD, TIMEOUT, Tool, ToolError, read_arguments


class ToolLimits(Section):
    """Limits on every call of a tool.

    Attributes:
        timeout_s: maximum seconds of one call, excluding the wait for its turn.
        concurrency: maximum number of concurrent calls; further calls wait.
        characters: maximum length of an observation.
    """

    timeout_s: Seconds = 30.0
    concurrency: Positive = 16
    characters: Positive = 16384


@dataclass
class Counts:
    """Statistics of the calls that ended.

    Attributes:
        calls: number of calls, failed calls included.
        seconds: total duration of the calls, without the wait for their turns.
        failures: number of failed calls by `ToolError.reason`.
    """

    calls: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)


class Runner:
    """A tool under `ToolLimits`, called with the text of a call. What a tool's `begin` awaits before a call, if it has one, takes none of
    the call's time. Cancelled calls count neither as calls nor as failures.
    """

    def __init__(self, tool: Tool, limits: ToolLimits) -> None:
        self.name = tool.name
        self.counts = Counts()
        self._tool, self._limits = tool, limits
        self._begin: Callable[[], Awaitable[object]] | None = getattr(tool, "begin", None)
        self._turns = asyncio.Semaphore(limits.concurrency)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in the form chat templates accept (OpenAI's `tools`)."""
        function = {"name": self.name, "description": self._tool.description, "parameters": dict(self._tool.parameters)}
        return {"type": "function", "function": function}

    async def call(self, text: str) -> str:
        """Return the observation.

        Raises:
            ToolError: the tool's own; see `read_arguments`; "tool_timeout" after `ToolLimits.timeout_s`, "tool_flood" beyond
                `ToolLimits.characters`, "tool_crash" if the tool raised any other exception or did not return text.
        """
        begin = time.perf_counter()
        try:
            arguments = read_arguments(text, self._tool)
            if self._begin is not None:
                await self._begin()
            async with self._turns:
                begin = time.perf_counter()
                answer = await self._bounded(arguments)
        except ToolError as error:
            self._count(begin, error.reason)
            raise
        self._count(begin)
        return answer

    async def close(self) -> None:
        """See `Tool`."""
        await self._tool.close()

    async def _bounded(self, arguments: Mapping[str, Any]) -> str:
        limits = self._limits
        try:
            text: object = await plugins.awaited(lambda: self._tool.call(arguments), limits.timeout_s, self.name)
        except ToolError as error:
            raise ToolError(error.reason, self._cut(error.detail)) from error
        except plugins.Overdue as error:
            raise ToolError(TIMEOUT, f"error: {error}") from error
        except Exception as error:
            raise ToolError(CRASH, f"error: {self.name} raised {plugins.told(error)}") from error
        if not isinstance(text, str):
            raise ToolError(CRASH, f"error: {self.name} answered {type(text).__name__}, not text")
        if len(text) > limits.characters:
            raise ToolError(FLOOD, self._cut(text))
        return text

    def _cut(self, text: str) -> str:
        most = self._limits.characters
        return text if len(text) <= most else f"{text[:most]}\n[cut at {most} characters]"

    def _count(self, begin: float, reason: str | None = None) -> None:
        self.counts.calls += 1
        self.counts.seconds += time.perf_counter() - begin
        if reason is not None:
            self.counts.failures[reason] += 1
