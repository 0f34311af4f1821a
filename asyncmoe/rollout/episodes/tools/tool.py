"""The errors of tools, the arguments of their calls, JSON from a model or a client, and environment variables named by keys of tools."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from asyncmoe.errors import AsyncmoeError, ConfigError

ERROR, TIMEOUT, CRASH, FLOOD, KILLED = "tool_error", "tool_timeout", "tool_crash", "tool_flood", "tool_killed"


class ToolError(AsyncmoeError):
    """A tool call failed.

    Args:
        reason: `ERROR`: the argument was wrong, or the code in it raised; the model learns from this, so `detail` is an observation like
            any other. `TIMEOUT`: no answer in time. `KILLED`: a signal ended the policy's program. `FLOOD`: the answer exceeded its limit;
            `detail` begins with the answer. `CRASH`: the tool itself failed, whatever the policy asked.
        detail: description of the failure, for the model.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


def read_json(text: str | bytes) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: the text is not JSON, or its value cannot be passed on: it is nested too deeply, or has a lone surrogate or a number
            that is not finite.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return value


def read_arguments(text: str, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in a call. Text that is not a JSON object is the value of the tool's only parameter.

    Args:
        name, parameters: the tool's, as in `Runner`.

    Raises:
        ToolError: `ERROR`: the text is not a JSON object, and the tool does not have exactly one parameter.
    """
    try:
        given = read_json(text)
    except ValueError:
        given = text
    if isinstance(given, dict):
        return given
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    if len(properties) != 1:
        raise ToolError(ERROR, f"error: the arguments of {name} must be a JSON object")
    ((only, schema),) = properties.items()
    return {only: text if schema.get("type") == "string" else given}


def variable(key: str, name: str) -> str:
    """Return the value of the environment variable that a configuration key names. Raises ConfigError if it is not set."""
    if name not in os.environ:
        raise ConfigError(key, got=f"no variable {name} in the environment", expected="this variable to be set", hint="export it")
    return os.environ[name]
