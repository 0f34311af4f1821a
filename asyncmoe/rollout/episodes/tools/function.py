"""Functions as tools: coroutine functions, which run in the rollout worker's loop and must not block it, and plain ones, which run in
processes of their own (`asyncmoe.rollout.processes`), because they may hang or hold the interpreter.

A function gets its parameters by name from a JSON object, checked and converted by pydantic as the annotations say. A wrong argument is an
observation, from which the policy learns.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pydantic

from asyncmoe import plugins
from asyncmoe.errors import AsyncmoeError, ConfigError
from asyncmoe.rollout.episodes.tools.calculator import calculator
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits, raised
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, ToolError
from asyncmoe.rollout.processes import Processes

_KEY = "environment.tools.names"


class Function:
    """A function with its schema.

    Args:
        target: `package.module:function`, or "calculator".
        own: the function itself, if it cannot be imported.

    Attributes:
        name: the function's.
        description: the docstring.
        parameters: JSON schema, an object.

    Raises:
        ConfigError: no such function; a parameter cannot be passed by name, or has an annotation that fits no JSON value.
    """

    def __init__(self, target: str, own: Callable[..., Any] | None = None) -> None:
        forms = "calculator, python or package.module:function"
        found: Any = own or (calculator if target == "calculator" else plugins.load_function(target, _KEY, forms=forms))
        self._target, self._awaits = target, inspect.iscoroutinefunction(found)
        self.name = getattr(found, "__name__", target.rpartition(":")[2])
        self.description = inspect.getdoc(found) or ""
        try:
            self._checked: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(found)
            schema = self._checked.json_schema()
        except (pydantic.errors.PydanticUserError, NameError, TypeError, ValueError) as error:
            got = f"{target}: {' '.join(str(error).split())[:300]}"
            raise ConfigError(_KEY, got=got, expected="a function whose annotations fit JSON values") from error
        if not schema.get("properties"):
            got = f"{target}{inspect.signature(found)}"
            raise ConfigError(_KEY, got=got, expected="a function with one or more parameters that are passed by name")
        self.parameters: Mapping[str, Any] = {**schema, "properties": {name: _shown(one) for name, one in schema["properties"].items()}}

    def run(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function; return its result.

        Raises:
            ToolError: `ERROR`: the arguments do not fit its parameters.
        """
        try:
            return self._checked.validate_json(json.dumps(arguments))
        except pydantic.ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors()]
            raise ToolError(ERROR, f"error: {'; '.join(wrong)}") from error

    def under(self, limits: ToolLimits) -> Runner:
        """Return the function as a tool."""
        if self._awaits:
            return Runner(self.name, self.description, self.parameters, self.run, limits)
        processes = Processes(f"{__name__}:serve", {"target": self._target}, f"the process of {self.name}", _KEY)
        ask = partial(_ask, processes)
        return Runner(self.name, self.description, self.parameters, ask, limits, close=processes.close)


async def _ask(processes: Processes, arguments: Mapping[str, Any]) -> object:
    """Return what a plain function returns.

    Raises:
        ToolError: the function's own; `ERROR`: it raised another exception; `CRASH`: its process did not start or ended, or its answer is
            too large.
    """
    try:
        reason, said = await processes.ask(arguments)
    except AsyncmoeError as error:
        raise ToolError(CRASH, f"error: {error}") from error
    if reason:
        raise ToolError(reason, said)
    return said


@contextmanager
def serve(target: str) -> Iterator[Callable[[Mapping[str, Any]], object]]:
    """Answer calls in a process: ("", the return value, or null if that is not text), or (`ToolError.reason`, `ToolError.detail`). See
    `asyncmoe.rollout.process_worker`."""
    function = Function(target)

    def answer(arguments: Mapping[str, Any]) -> tuple[str, str | None]:
        try:
            text = function.run(arguments)
            return "", text if isinstance(text, str) else None
        except BaseException as error:  # noqa: BLE001  any exception of a user's function is reported to the worker
            failed = error if isinstance(error, ToolError) else raised(error)
            return failed.reason, failed.detail

    yield answer


def _shown(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter without the title that pydantic derives from its name. Without annotation, it is a string."""
    return {key: value for key, value in schema.items() if key != "title"} or {"type": "string"}
