"""A user's function as a tool, found by its name, and its arguments: a JSON schema from signature and docstring, and checked calls.

A function of one text parameter gets the text. Any other function gets its parameters by name, from a JSON object (`json_arguments`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from asyncmoe import plugins
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.tool import one_string

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ITEM = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s+(.*)")


def find(target: str) -> Callable[..., object]:
    """Import `package.module:function`. Raises as `asyncmoe.plugins.load_function`."""
    return plugins.load_function(target, "environment.tools.names", forms="calculator, python or package.module:function")


class Arguments:
    """The arguments of a function.

    Attributes:
        description: the docstring without its section "Args:".
        parameters: JSON schema, an object.
        takes_json: whether `call` gets a JSON object; otherwise a text.

    Raises:
        ConfigError: a parameter has no name in calls, or an annotation that no JSON value fits.
    """

    def __init__(self, function: Callable[..., object], target: str) -> None:
        self._function = function
        self.description, told = _docstring(inspect.getdoc(function) or "")
        given = _parameters(function, target)
        self.takes_json = len(given) != 1 or next(iter(given.values()))[0] not in (str, object, Any)
        if not self.takes_json:
            (name,) = given
            self.parameters: Mapping[str, Any] = one_string(name, told.get(name, ""))
            return
        # Imports pydantic, which takes longer than the rest of the start of a function's process.
        from asyncmoe.rollout.episodes.tools.json_arguments import JsonArguments

        try:
            self._json = JsonArguments(given, told)
        except ValueError as error:
            got, expected = f"{target}: {error}", "parameters with annotations that JSON has values for"
            raise ConfigError("environment.tools.names", got=got, expected=expected) from error
        self.parameters = self._json.schema

    def call(self, argument: str) -> Any:
        """Call the function with a text or, if `takes_json`, with the values of a JSON object; return its result.

        Raises:
            ToolError: `ERROR`: the text is no JSON object of these parameters.
        """
        return self._function(**self._json.read(argument)) if self.takes_json else self._function(argument)


def _parameters(function: Callable[..., object], target: str) -> dict[str, tuple[Any, object]]:
    """Return (type, default) of each parameter by name; `Any` without annotation, `inspect.Parameter.empty` without default."""
    try:
        hints = get_type_hints(function, include_extras=True) if inspect.isroutine(function) else {}
        found = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        expected = "a function with annotations that can be imported"
        raise ConfigError("environment.tools.names", got=f"{target}: {error}", expected=expected) from error
    if not found or any(one.kind not in _NAMED for one in found.values()):
        got = f"{target}{inspect.signature(function)}"
        raise ConfigError("environment.tools.names", got=got, expected="a function of named parameters, at least one")
    return {name: (hints.get(name, Any), one.default) for name, one in found.items()}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into the text before its sections and the descriptions in "Args:", by parameter (Google's style)."""
    head, _, rest = text.partition("\nArgs:\n")
    told: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        if line.strip() and not line.startswith(" "):
            break
        if (item := _ITEM.fullmatch(line.strip())) and len(line) - len(line.lstrip()) <= 4:
            name = item[1]
            told[name] = item[2]
        elif name and line.strip():
            told[name] += f" {line.strip()}"
    return head.strip(), told
