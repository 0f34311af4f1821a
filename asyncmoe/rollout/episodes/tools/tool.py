"""What a tool is, and how it fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from asyncmoe.errors import AsyncmoeError

ERROR, TIMEOUT, CRASH, FLOOD = "tool_error", "tool_timeout", "tool_crash", "tool_flood"


class ToolError(AsyncmoeError):
    """A call without a result.

    Args:
        reason: `ERROR`: the argument was wrong, or the code it holds raised: what a model learns from, so `detail` is an observation
            like any other. `TIMEOUT`: no answer in time. `CRASH`: the tool itself broke. `FLOOD`: it said more than it may; `detail`
            begins with what it said.
        detail: what happened, in words for the model.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class Tool(Protocol):
    """Something a model can ask while it responds. Calls run concurrently."""

    @property
    def name(self) -> str:
        """What a call names; letters, digits and underscores."""
        ...

    @property
    def description(self) -> str:
        """What it does, for the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments, an object. A tool of one string parameter is called with that string."""
        ...

    async def call(self, argument: str) -> str:
        """The observation. Cancelled, it ends whatever it started.

        Raises:
            ToolError: there is none.
        """
        ...

    async def close(self) -> None:
        """End what it started."""
        ...


def schema(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates take it (OpenAI's `tools`)."""
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}


def one_string(name: str, what: str) -> dict[str, Any]:
    """JSON schema of a tool that takes one string."""
    return {"type": "object", "properties": {name: {"type": "string", "description": what}}, "required": [name]}
