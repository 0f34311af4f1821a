"""Read a configuration from YAML and overrides; explain every key that is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from asyncmoe.config import gone
from asyncmoe.config.fields import said
from asyncmoe.config.refusals import COMMAND_LINE, UNKNOWN, Source, explain
from asyncmoe.config.schema import Config
from asyncmoe.errors import ConfigError, Faults, together

Schema = TypeVar("Schema", bound=BaseModel)


def load_as(schema: type[Schema], path: Path | None, overrides: Sequence[str] = (), *, idle: bool = False) -> Schema:
    """Read a YAML file and apply `key.path=value` overrides; values are parsed as YAML. Without a file, only the overrides count.

    Args:
        idle: nothing will be started, so removed keys (`asyncmoe.config.gone`) and unknown keys of the file, which another version wrote,
            are ignored.

    Raises:
        ConfigError: the file is missing or not YAML, or a key, type or value is refused; the message has a line for each.
    """
    values, lines = ({}, {}) if path is None else read(path)
    for override in overrides:
        _override(values, override)
    source = Source(str(path or COMMAND_LINE), lines, [tuple(override.partition("=")[0].split(".")) for override in overrides])
    removed = gone.take(values) if schema is Config else {}
    refused = [
        ConfigError(f"{source.at(key)}: {'.'.join(key)}", got=f"{said(value)}, which was removed", expected=instead)
        for key, (value, instead) in ({} if idle else removed).items()
    ]
    if refused:
        refused[-1].args = (f"{refused[-1]}; asyncmoe at commit {gone.LAST} still has it",)
    return _validated(schema, values, source, refused, idle=idle)


def read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Return the values of a YAML file, and the line of each key by its path. Raises ConfigError if it is missing or not YAML."""
    try:
        if not path.is_file():  # reading a device may never end
            hint = f"the file comes first: CONFIG {path}" if "=" in str(path) else None
            raise ConfigError(
                str(path),
                got="a directory without config.yaml" if path.is_dir() else "no such file",
                expected="a YAML configuration",
                hint=hint,
            )
        text = path.read_text(encoding="utf-8")
        node, values = yaml.compose(text, Loader=_Loader), yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), got=" ".join(str(error).split()), expected="valid YAML") from error
    except OSError as error:
        raise ConfigError(str(path), got=error.strerror, expected="a readable YAML configuration") from error
    if not isinstance(values, dict):
        raise ConfigError(str(path), got=type(values).__name__, expected="a mapping of sections")
    return values, dict(_lines(node))


def parse(values: dict[str, Any], source: str = "config") -> Config:
    """Validate plain values.

    Raises:
        ConfigError: names every invalid value and the path of its key, a line each.
    """
    return _validated(Config, values, Source(source))


def section(schema: type[Schema], values: object, key: str) -> Schema:
    """Validate plain values that a user's own code gives for the section `key`.

    Raises:
        ConfigError: names every invalid value and the path of its key, a line each.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        found = [(one.what.removeprefix(": "), one) for one in explain(error, Source(""), schema)]
        named = ((what if what.startswith(f"{key}.") else f"{key}.{what}".rstrip("."), one) for what, one in found)
        raise together([ConfigError(what, got=one.got, expected=one.expected, hint=one.hint) for what, one in named]) from None


def _validated(
    schema: type[Schema], values: dict[str, Any], source: Source, refused: Sequence[ConfigError] = (), *, idle: bool = False
) -> Schema:
    """Validate values. Rules between keys apply only to values that are valid by themselves, so the rest is validated again without the
    refused keys. Raises ConfigError with a line for each of `refused` and each error of the schema."""
    faults, found, cut = Faults(*refused), None, set[str]()
    rest: dict[str, Any] | None = values
    while rest is not None and found is None:
        try:
            found = schema.model_validate(rest)
        except ValidationError as error:
            explained = {one.what.rpartition(": ")[2]: one for one in explain(error, source, schema)}
            passed_over = {key for key, one in explained.items() if idle and one.got == UNKNOWN and not one.what.startswith(COMMAND_LINE)}
            # If a section lacks something only because a key was taken out of it, the user made no error.
            cause = {key: one for key, one in explained.items() if one.got != "nothing" or key.rpartition(".")[0] not in cut}
            if own := [one for key, one in cause.items() if key not in passed_over]:
                faults.add(together(own))
            keys = {*explained}
            cut |= {key.rpartition(".")[0] for key in keys}
            while keys and (left := _without(rest, keys)) == rest:  # none of these keys is given: take out their sections
                keys = {key.rpartition(".")[0] for key in keys if "." in key}
            rest = left if keys else None
    if found is None or faults.found:
        wrong = together(faults.found)
        wrong.rest = found
        raise wrong
    return found


def _without(value: Any, keys: Collection[str], at: str = "") -> Any:
    """Return nested values without the keys at some paths."""
    if isinstance(value, dict):
        return {name: _without(part, keys, f"{at}{name}.") for name, part in value.items() if f"{at}{name}" not in keys}
    return [_without(part, keys, f"{at}{index}.") for index, part in enumerate(value)] if isinstance(value, list) else value


def _lines(node: yaml.Node | None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the path of every key of a mapping with its line, counted from 1."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, str(key.value)), key.start_mark.line + 1
            yield from _lines(value, (*path, str(key.value)))


def _override(values: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(COMMAND_LINE, got=repr(override), expected="key.path=value")
    *parents, last = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{COMMAND_LINE}: {path}", got=f"{parent}, which is no section", expected="a section")
    try:
        value = yaml.load(text, Loader=_Loader)
        values[last] = text if text.endswith(":") and isinstance(value, dict) else value  # an incomplete module:name, not a mapping
    except yaml.YAMLError as error:
        raise ConfigError(f"{COMMAND_LINE}: {path}", got=repr(text), expected="a YAML value") from error


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys; YAML would silently keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)
