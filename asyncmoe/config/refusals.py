"""Explain a refused configuration in the user's terms: where the key is, what it got, what it accepts, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import UnionType
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from asyncmoe.config.schema import Config
from asyncmoe.errors import ConfigError
from asyncmoe.plugins import nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

COMMAND_LINE = "command line"
"""Location, in messages, of a key set by an override."""
UNKNOWN = "an unknown key"
"""What the error of a key that the schema lacks got."""


@dataclass(frozen=True)
class Source:
    """Where values come from, for messages.

    Attributes:
        name: name of the file.
        lines: path of a key -> its line in the file.
        overrides: paths of the keys that the command line sets.
    """

    name: str
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    overrides: Sequence[tuple[str, ...]] = ()

    def at(self, key: Sequence[str]) -> str:
        """Return the location of a key: "FILE:LINE", the file alone if the key is not in it, or the command line if an override sets it."""
        path = tuple(key)
        line, section = self.lines.get(path), path[:-1]
        for override in self.overrides:
            within = path[: len(override)] == override
            opened = line is None and path and override[: len(path)] == path
            missing = line is None and section and section not in self.lines and override[: len(section)] == section
            if within or opened or missing:
                return COMMAND_LINE
        return self.name if line is None else f"{self.name}:{line}"


def explain(error: ValidationError, source: Source, schema: type[BaseModel] = Config) -> list[ConfigError]:
    """Return an error for each invalid key, in the order of the schema. Not empty."""
    found: dict[str, ConfigError] = {}
    for one in error.errors():
        made = _explained(one, source, schema)
        found.setdefault(made.what, made)  # a union reports a value once for each of its types
    return list(found.values())


_KINDS: Mapping[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping of keys",
    "path": "a path, which is text",
}
"""What pydantic's type errors expect, by the beginning of their name (`int_parsing`, `int_from_float`, ...)."""


def _explained(one: ErrorDetails, source: Source, schema: type[BaseModel]) -> ConfigError:
    parts = tuple(str(part) for part in one["loc"])
    what = f"{source.at(parts)}: {'.'.join(parts)}"
    if one["type"] == "extra_forbidden":
        return _unknown(one["loc"], what, schema)
    if one["type"] == "missing":
        return ConfigError(what, got="nothing", expected="a value")
    if one["type"] == "model_type":
        return ConfigError(what, got=repr(one["input"]), expected="a section (a mapping of keys)")
    if one["type"] == "value_error":
        key, _, rest = str(one["ctx"]["error"]).partition(": got ")
        got, _, expected = rest.partition(", expected ")
        if "." not in key:  # the user chose the section's name, which its validator does not know
            key = ".".join(parts if parts[-1:] == (key,) else (*parts, key))
        return ConfigError(f"{source.at(key.split('.'))}: {key}", got=got, expected=expected)
    return ConfigError(what, got=repr(one["input"]), expected=wanted(one), hint=_meant(one))


def wanted(one: ErrorDetails) -> str:
    """Return what pydantic expected of a value."""
    kind, _, fault = one["type"].partition("_")
    if kind in _KINDS and fault in ("type", "parsing", "from_float"):
        return _KINDS[kind]
    message = one["msg"].removeprefix("Input should be ")
    return message[:1].lower() + message[1:]


def _meant(one: ErrorDetails) -> str | None:
    """Return, as a hint, the choice that a misspelt value most likely means."""
    context = one.get("ctx", {})
    near = context.get("meant")
    if one["type"] == "literal_error" and isinstance(one["input"], str):
        near = nearest(one["input"], re.findall(r"'([^']*)'", str(context.get("expected", ""))))
    return f"did you mean {near}?" if near else None


def _unknown(location: tuple[int | str, ...], what: str, schema: type[BaseModel]) -> ConfigError:
    """Refuse an unknown key; suggest the nearest key of the section or the same key elsewhere."""
    *section, name = (str(part) for part in location)
    fields = list(_section_at(schema, location[:-1]).model_fields)
    near = [".".join((*section, one)) for one in get_close_matches(name, fields, 1)]
    meant = near or [key for key in _keys(schema) if key.rpartition(".")[2] == name][:3]
    hint = f"did you mean {' or '.join(meant)}?" if meant else None
    return ConfigError(what, got=UNKNOWN, expected=f"one of {', '.join(fields)}", hint=hint)


def keys_named(name: str) -> list[str]:
    """Return the keys of a run's configuration whose path is `name` or ends in it."""
    return [key for key in _keys(Config) if key == name or key.rpartition(".")[2] == name]


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the path of every key of the schema, except keys of sections in lists and mappings, whose paths contain an index or a name."""
    for name, one in section.model_fields.items():
        yield prefix + name
        choices = one.annotation.__args__ if isinstance(one.annotation, UnionType) else (one.annotation,)
        for option in choices:
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from _keys(option, f"{prefix}{name}.")


def _section_at(section: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    for part in location:
        if part not in section.model_fields:
            continue  # an index or a name in a list or mapping of sections: `section` is already their class
        annotation = section.model_fields[str(part)].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        section = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return section
