"""Functions as tools: coroutine functions, which run in the controller's loop and must not block it, and plain ones, which run in processes
of their own (`asyncmoe.rollout.processes`), because a user's may hang or hold the interpreter.

A function gets its parameters by name from a JSON object, checked and converted by pydantic as the annotations say. A wrong argument is an
observation, from which the policy learns.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pydantic

from asyncmoe import plugins
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, Tool, ToolError
from asyncmoe.rollout.processes import Broken, Processes

_KEY = "environment.tools.names"
_MOST_ERRORS = 5


def load(target: str) -> Tool:
    """Make a tool of a user's `package.module:function`, with the function's name.

    Raises:
        ConfigError: no such function, or one with parameters that a call cannot give.
    """
    function = _find(target)
    return AsyncFunction(function, target) if inspect.iscoroutinefunction(function) else InProcesses(function, target)


def _find(target: str) -> Callable[..., Any]:
    return plugins.load_function(target, _KEY, forms="calculator, python or package.module:function")


class Function:
    """A function with its schema.

    Attributes:
        description: the docstring.
        parameters: JSON schema, an object.

    Raises:
        ConfigError: a parameter has no name in calls, or an annotation that no JSON value fits.
    """

    def __init__(self, function: Callable[..., Any], target: str) -> None:
        self.name = getattr(function, "__name__", target.rpartition(":")[2])
        self.description = inspect.getdoc(function) or ""
        try:
            self._checked: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(_plain(function))
            schema = self._checked.json_schema()
        except (pydantic.errors.PydanticUserError, NameError, TypeError, ValueError) as error:
            got = f"{target}: {' '.join(str(error).split())[:300]}"
            raise ConfigError(_KEY, got=got, expected="parameters with annotations that JSON has values for") from error
        if not schema.get("properties"):
            got = f"{target}{inspect.signature(function)}"
            raise ConfigError(_KEY, got=got, expected="a function of named parameters, at least one")
        self.parameters: Mapping[str, Any] = {**schema, "properties": {name: _shown(one) for name, one in schema["properties"].items()}}

    def run(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function; return its result.

        Raises:
            ToolError: `ERROR`: the arguments do not fit its parameters.
        """
        try:
            return self._checked.validate_json(json.dumps(arguments))
        except pydantic.ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors()[:_MOST_ERRORS]]
            raise ToolError(ERROR, f"error: {'; '.join(wrong)}") from error


class AsyncFunction(Function):
    """A coroutine function as a `Tool`; all its calls run concurrently."""

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """See `Tool`. Raises ToolError: the function's own, or `ERROR` for any other exception."""
        try:
            return await self.run(arguments)
        except ToolError:
            raise
        except Exception as error:
            raise _raised(error) from error

    async def close(self) -> None:
        """See `Tool`."""


class InProcesses(Function):
    """A plain function as a `Tool`, in a process for each call that runs."""

    def __init__(self, function: Callable[..., Any], target: str) -> None:
        super().__init__(function, target)
        self._processes = Processes(f"{__name__}:serve", {"target": target}, f"the process of {self.name}", _KEY)

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """See `Tool`.

        Raises:
            ToolError: the function's own. `ERROR`: it raised another exception. `CRASH`: it ended its process, or answered too many bytes.
            AsyncmoeError: a process did not start.
        """
        try:
            answer = await self._processes.ask(arguments)
        except Broken as broken:
            raise ToolError(CRASH, f"error: {broken}") from broken
        if "error" in answer:
            raise ToolError(answer["reason"], answer["error"])
        return answer["text"]

    async def close(self) -> None:
        """See `Tool`."""
        await self._processes.close()


@contextmanager
def serve(target: str) -> Iterator[Callable[[Mapping[str, Any]], object]]:
    """Answer calls in a process: {"text": return value, null if it is no text} or {"error": text, "reason": `ToolError.reason`}. See
    `asyncmoe.rollout.process_worker`."""
    function = Function(_find(target), target)

    def answer(arguments: Mapping[str, Any]) -> dict[str, str | None]:
        try:
            text = function.run(arguments)
            return {"text": text if isinstance(text, str) else None}
        except BaseException as error:  # noqa: BLE001  any exception of a user's function is reported to the controller
            failed = error if isinstance(error, ToolError) else _raised(error)
            return {"error": failed.detail, "reason": failed.reason}

    yield answer


def _raised(error: BaseException) -> ToolError:
    return ToolError(ERROR, f"error: {type(error).__name__}: {error}")


def _plain(function: Callable[..., Any]) -> Any:
    """Return what pydantic takes for a function: not a cached one, nor an object that can be called."""
    if inspect.isfunction(function) or inspect.ismethod(function):
        return function

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return called


def _shown(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter without the title that pydantic derives from its name. One without annotation is a text."""
    return {key: value for key, value in schema.items() if key != "title"} or {"type": "string"}
