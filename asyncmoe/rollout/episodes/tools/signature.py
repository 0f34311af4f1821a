"""The arguments of a user's function as a tool: a JSON schema from its signature and docstring, and calls checked against it.

A function of one text parameter gets the text. Any other function gets its parameters by name, from a JSON object, checked and converted by
pydantic as their annotations say; a wrong argument is an observation, from which the policy learns.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import pydantic

from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import strict_json
from asyncmoe.rollout.episodes.tools.tool import ERROR, ToolError, one_string

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ITEM = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s+(.*)")
_MOST_ERRORS = 5


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
        self._names = tuple(given)
        if not self.takes_json:
            (name,) = given
            self.parameters: Mapping[str, Any] = one_string(name, told.get(name, ""))
            return
        try:
            self._model = _model(given, told)
            self.parameters = _without_titles(self._model.model_json_schema(by_alias=True))
        except (pydantic.errors.PydanticUserError, TypeError, ValueError) as error:
            got = f"{target}: {' '.join(str(error).split())[:300]}"
            raise ConfigError(
                "environment.tools.names", got=got, expected="parameters with annotations that JSON has values for"
            ) from error

    def call(self, argument: str) -> Any:
        """Call the function with a text or, if `takes_json`, with the values of a JSON object; return its result.

        Raises:
            ToolError: `ERROR`: the text is no JSON object of these parameters.
        """
        if not self.takes_json:
            return self._function(argument)
        try:
            made = self._model.model_validate_json(argument)
        except pydantic.ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors()[:_MOST_ERRORS]]
            raise ToolError(ERROR, f"error: {'; '.join(wrong)}") from error
        try:
            # pydantic also reads NaN, and numbers beyond the largest as infinity.
            strict_json.read(argument)
        except ValueError as error:
            raise ToolError(ERROR, f"error: arguments that are not valid JSON: {error}") from error
        # Parameters that a call leaves out keep the function's own defaults.
        return self._function(**{name: getattr(made, f"p{i}") for i, name in enumerate(self._names) if f"p{i}" in made.model_fields_set})


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


def _model(given: Mapping[str, tuple[Any, object]], told: Mapping[str, str]) -> type[pydantic.BaseModel]:
    # Fields have names of their own: pydantic refuses some names that a parameter may have.
    fields: dict[str, Any] = {}
    for i, (name, (kind, default)) in enumerate(given.items()):
        shown: Any = ... if default is inspect.Parameter.empty else default
        fields[f"p{i}"] = (kind, pydantic.Field(shown, alias=name, description=told.get(name)))
    return pydantic.create_model("arguments", __config__=pydantic.ConfigDict(extra="forbid"), **fields)


def _without_titles(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema without the titles that pydantic derives from names."""
    properties = {name: {key: value for key, value in one.items() if key != "title"} for name, one in schema["properties"].items()}
    return {**{key: value for key, value in schema.items() if key != "title"}, "properties": properties}


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
