"""The interface of a tool, and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from asyncmoe.errors import AsyncmoeError

ERROR, TIMEOUT, CRASH, FLOOD = "tool_error", "tool_timeout", "tool_crash", "tool_flood"


class ToolError(AsyncmoeError):
    """A tool call failed.

    Args:
        reason: `ERROR`: the argument was wrong, or the code in it raised; the model learns from this, so `detail` is an observation like
            any other. `TIMEOUT`: no answer in time. `CRASH`: the tool itself failed. `FLOOD`: its answer exceeded the limit; `detail`
            begins with the answer.
        detail: description of the failure, for the model.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class Tool(Protocol):
    """A tool that a model can call while it responds. Calls run concurrently."""

    @property
    def name(self) -> str:
        """The name used in calls; letters, digits and underscores."""
        ...

    @property
    def description(self) -> str:
        """Description of the tool, for the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments, an object. A tool with one string parameter is called with that string."""
        ...

    async def call(self, argument: str) -> str:
        """Return the observation. If cancelled, end everything this call started.

        Raises:
            ToolError: the call failed.
        """
        ...

    async def close(self) -> None:
        """End everything the tool started."""
        ...


def schema(tool: Tool) -> dict[str, Any]:
    """Return the tool's schema in the form chat templates accept (OpenAI's `tools`)."""
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}


def one_string(name: str, what: str) -> dict[str, Any]:
    """Return the JSON schema of a tool with one string parameter."""
    return {"type": "object", "properties": {name: {"type": "string", "description": what}}, "required": [name]}
