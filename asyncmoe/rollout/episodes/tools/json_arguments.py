"""The arguments of a function from a JSON object, checked and converted by pydantic as the parameters' annotations say.

A wrong argument is an observation, from which the policy learns.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pydantic

from asyncmoe.rollout.episodes.tools import strict_json
from asyncmoe.rollout.episodes.tools.tool import ERROR, ToolError

_MOST_ERRORS = 5


class JsonArguments:
    """The parameters of a function.

    Args:
        given: (annotation, default) of each parameter by name; `inspect.Parameter.empty`: no default.
        told: descriptions of parameters, by name.

    Attributes:
        schema: JSON schema, an object.

    Raises:
        ValueError: no JSON value fits an annotation.
    """

    def __init__(self, given: Mapping[str, tuple[Any, object]], told: Mapping[str, str]) -> None:
        self._names = tuple(given)
        try:
            self._model = _model(given, told)
            self.schema = _without_titles(self._model.model_json_schema(by_alias=True))
        except (pydantic.errors.PydanticUserError, TypeError, ValueError) as error:
            raise ValueError(" ".join(str(error).split())[:300]) from error

    def read(self, argument: str) -> dict[str, Any]:
        """Return the values of a JSON object by parameter. Parameters that it leaves out keep the function's own defaults.

        Raises:
            ToolError: `ERROR`: the text is no JSON object of these parameters.
        """
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
        return {name: getattr(made, f"p{i}") for i, name in enumerate(self._names) if f"p{i}" in made.model_fields_set}


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
