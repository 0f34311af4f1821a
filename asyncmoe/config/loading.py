"""Read a configuration from YAML and overrides; explain every key that is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from asyncmoe.config.schema import Config
from asyncmoe.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True)
class Source:
    """Where values come from, for messages.

    Attributes:
        name: of the file.
        lines: line in the file by path of the key; keys of overrides have none.
    """

    name: str
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def at(self, key: Sequence[str]) -> str:
        """Return "FILE:LINE", or the file alone if the key is not in it."""
        line = self.lines.get(tuple(key))
        return self.name if line is None else f"{self.name}:{line}"


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration of a run; see `load_as`."""
    return load_as(Config, path, overrides)


def load_as(schema: type[Schema], path: Path | None, overrides: Sequence[str] = ()) -> Schema:
    """Read a YAML file and apply `key.path=value` overrides; values are parsed as YAML. Without a file the overrides are all.

    Raises:
        ConfigError: the file is missing or not YAML, or a key, type or value is refused; every refused key has a line.
    """
    values, lines = ({}, {}) if path is None else _read(path)
    for override in overrides:
        _override(values, override)
        lines.pop(tuple(override.partition("=")[0].split(".")), None)
    return _validated(schema, values, Source(str(path or "command line"), lines))


def _read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Return the values of a YAML file, and the line of each key by its path. Raises ConfigError if it is missing or not YAML."""
    if not path.is_file():
        raise ConfigError(str(path), got="no such file", expected="a YAML configuration")
    try:
        with path.open(encoding="utf-8") as file:
            node = yaml.compose(file, Loader=_Loader)
        with path.open(encoding="utf-8") as file:
            values = yaml.load(file, Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), got=" ".join(str(error).split()), expected="valid YAML") from error
    if not isinstance(values, dict):
        raise ConfigError(str(path), got=type(values).__name__, expected="a mapping of sections")
    return values, dict(_lines(node))


def parse(values: dict[str, Any], source: str = "config") -> Config:
    """Validate plain values.

    Raises:
        ConfigError: names every invalid value with the path of its key, a line each.
    """
    return _validated(Config, values, Source(source))


def _validated(schema: type[Schema], values: dict[str, Any], source: Source) -> Schema:
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first, *others = _explain(error, source, schema)
        if others:
            first.args = ("\n".join(str(one) for one in (first, *others)),)
        raise first from None


def _lines(node: yaml.Node | None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the path of every key of a mapping with its line, counted from 1."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, str(key.value)), key.start_mark.line + 1
            yield from _lines(value, (*path, str(key.value)))


def _override(values: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError("override", got=repr(override), expected="key.path=value")
    *parents, last = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override {path}", got=f"{parent} is not a section", expected="a section")
    try:
        values[last] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {path}", got=repr(text), expected="a YAML value") from error


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys; YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _explain(error: ValidationError, source: Source, schema: type[BaseModel] = Config) -> list[ConfigError]:
    """Return an error for each invalid key, in the order of the schema. Not empty."""
    found: dict[str, ConfigError] = {}
    for one in error.errors():
        made = _explained(one, source, schema)
        found.setdefault(made.what, made)  # a union reports a value once for each of its types
    return list(found.values())


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
        return ConfigError(f"{source.at(key.split('.'))}: {key}", got=got, expected=expected)
    message = one["msg"]
    expected = message[0].lower() + message[1:].removeprefix("Input should be ") if not message.startswith("Input") else message[16:]
    return ConfigError(what, got=repr(one["input"]), expected=expected)


RENAMED: Mapping[str, str] = {
    "queue.staleness.eta": "queue.staleness.max_staleness",
    "queue.staleness.max_age": "queue.staleness.drop_above",
    "cluster.silence_s": "cluster.heartbeat_timeout_s",
    "cluster.clock_s": "cluster.max_clock_skew_s",
    "objective.tis_cap": "objective.correction.cap",
    "task.scorer": "scoring.scorer",
    "task.scorer_timeout_s": "scoring.timeout_s",
}
"""Former key -> its present name."""


def _unknown(location: tuple[int | str, ...], what: str, schema: type[BaseModel]) -> ConfigError:
    """Refuse an unknown key; name what replaced a renamed one, else suggest the nearest key of the section or the same key elsewhere."""
    *section, name = (str(part) for part in location)
    if schema is Config and (now := RENAMED.get(".".join((*section, name)))) is not None:
        return ConfigError(what, got="a key that was renamed", expected=now)
    fields = list(_section_at(schema, location[:-1]).model_fields)
    near = [".".join((*section, one)) for one in get_close_matches(name, fields, 1)]
    elsewhere = [key for key in _keys(schema) if key.rpartition(".")[2] == name]
    meant = near or elsewhere[:3]
    hint = f"did you mean {' or '.join(meant)}?" if meant else None
    return ConfigError(what, got="an unknown key", expected=f"one of {', '.join(fields)}", hint=hint)


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the path of every key of the schema."""
    for name, one in section.model_fields.items():
        yield prefix + name
        for option in (one.annotation, *getattr(one.annotation, "__args__", ())):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from _keys(option, f"{prefix}{name}.")


def _section_at(section: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    for part in location:
        if part not in section.model_fields:
            continue  # the place in a list, or the name in a mapping, of a section that the part before it led to
        annotation = section.model_fields[str(part)].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        section = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return section
