"""A tool that a model can call while it responds: it runs under limits, and counts its calls."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asyncmoe import plugins
from asyncmoe.config.fields import Positive, Seconds, Section
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, FLOOD, TIMEOUT, ToolError, read_arguments
from asyncmoe.telemetry.rollout_schema import Calls


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


async def _nothing() -> None: ...


@dataclass(eq=False)
class Runner:
    """A tool under limits, called with the text of a call. Calls run concurrently; cancelled ones are not counted.

    Attributes:
        name: the name used in calls; letters, digits and underscores.
        description: for the model.
        parameters: JSON schema of the arguments, an object.
        function: returns the observation, a text. It raises `ToolError`; any other exception becomes an observation, from which the model
            learns. If cancelled, it ends everything the call started.
        begin: awaited before a call, outside its time limit.
        close: ends everything the tool started.
        counts: statistics of the calls that ended; their time excludes the wait for their turns.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[[Mapping[str, Any]], Awaitable[object]]
    limits: ToolLimits
    begin: Callable[[], Awaitable[object]] = _nothing
    close: Callable[[], Awaitable[None]] = _nothing
    counts: Calls = field(default_factory=Calls)

    def __post_init__(self) -> None:
        self._turns = asyncio.Semaphore(self.limits.concurrency)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in the form chat templates accept (OpenAI's `tools`)."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    async def call(self, text: str) -> str:
        """Return the observation.

        Raises:
            ToolError: that of the function or of `read_arguments`; `ERROR` for any other exception of the function, `TIMEOUT` after
                `ToolLimits.timeout_s`, `FLOOD` beyond `ToolLimits.characters`, `CRASH` if the answer is not text.
        """
        begin = time.perf_counter()
        try:
            arguments = read_arguments(text, self.name, self.parameters)
            await self.begin()
            async with self._turns:
                begin = time.perf_counter()
                answer = await self._bounded(arguments)
        except ToolError as error:
            self._count(begin, Counter([error.reason]))
            raise
        self._count(begin, Counter())
        return answer

    async def _bounded(self, arguments: Mapping[str, Any]) -> str:
        limits = self.limits
        try:
            text = await plugins.awaited(partial(self.function, arguments), limits.timeout_s, self.name)
        except plugins.Overdue as error:
            raise ToolError(TIMEOUT, f"error: {error}") from error
        except Exception as error:
            failed = error if isinstance(error, ToolError) else raised(error)
            raise ToolError(failed.reason, self._cut(failed.detail)) from error
        if not isinstance(text, str):
            raise ToolError(CRASH, f"error: {self.name} answered {type(text).__name__}, not text")
        if len(text) > limits.characters:
            raise ToolError(FLOOD, self._cut(text))
        return text

    def _cut(self, text: str) -> str:
        most = self.limits.characters
        return text if len(text) <= most else f"{text[:most]}\n[cut at {most} characters]"

    def _count(self, begin: float, failed: Counter[str]) -> None:
        counts, seconds = self.counts, time.perf_counter() - begin
        self.counts = Calls(calls=counts.calls + 1, seconds=counts.seconds + seconds, failures=failed + Counter(counts.failures))


def raised(error: BaseException) -> ToolError:
    """Return the observation of an exception that a tool's function raised."""
    return ToolError(ERROR, f"error: {plugins.told(error)}")
