"""Read a configuration from YAML and overrides; explain every key that is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from asyncmoe.config.schema import Config
from asyncmoe.errors import ConfigError, together
from asyncmoe.plugins import nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Schema = TypeVar("Schema", bound=BaseModel)
COMMAND_LINE = "command line"
"""Place of a key that an override sets, in messages."""
_TOO_DEEP = "sections or lists nested too deeply"
_MOST_FILES = 40
"""YAML files of a folder that a message names."""


@dataclass(frozen=True)
class Source:
    """Where values come from, for messages.

    Attributes:
        name: of the file.
        lines: line in the file by path of the key.
        overrides: what the command line sets, by path of the key.
    """

    name: str
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    overrides: Mapping[tuple[str, ...], str] = field(default_factory=dict)

    def at(self, key: Sequence[str], message: str = "") -> str:
        """Return the place of a key: "FILE:LINE", the file alone if the key is not in it, or the command line if an override sets it.

        Args:
            message: why the value is refused; the overrides of other keys that it names are added to the place.
        """
        path = tuple(key)
        line, section = self.lines.get(path), path[:-1]
        for override in self.overrides:
            within = path[: len(override)] == override
            opened = line is None and path and override[: len(path)] == path
            missing = line is None and section and section not in self.lines and override[: len(section)] == section
            if within or opened or missing:
                return COMMAND_LINE
        place = self.name if line is None else f"{self.name}:{line}"
        causes = [text for override, text in self.overrides.items() if _names(message, override)]
        return f"{place} with {' '.join(causes)}" if causes else place


def _names(message: str, key: Sequence[str]) -> bool:
    return re.search(rf"(?<![\w.]){re.escape('.'.join(key))}(?![\w.])", message) is not None


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration of a run; see `load_as`."""
    return load_as(Config, path, overrides)


def load_as(schema: type[Schema], path: Path | None, overrides: Sequence[str] = ()) -> Schema:
    """Read a YAML file and apply `key.path=value` overrides; values are parsed as YAML. Without a file the overrides are all.

    Raises:
        ConfigError: the file is missing or not YAML, or a key, type or value is refused; every refused key has a line.
    """
    values, lines = ({}, {}) if path is None else read(path)
    given = {}
    for override in overrides:
        _override(values, override)
        given[tuple(override.partition("=")[0].split("."))] = " ".join(override.split())
    return _validated(schema, values, Source(str(path or COMMAND_LINE), lines, given))


def read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Return the values of a YAML file, and the line of each key by its path. Raises ConfigError if it is missing or not YAML."""
    try:
        if path.is_dir():
            raise ConfigError(str(path), got="a folder", expected="a YAML configuration", hint=_files_in(path))
        if not path.is_file():  # a device may have no end
            got = "something else than a file" if path.exists() else "no such file"
            raise ConfigError(str(path), got=got, expected="a YAML configuration")
        with path.open(encoding="utf-8") as file:
            node = yaml.compose(file, Loader=_Loader)
        with path.open(encoding="utf-8") as file:
            values = yaml.load(file, Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), got=" ".join(str(error).split()), expected="valid YAML") from error
    except RecursionError as error:
        raise ConfigError(str(path), got=_TOO_DEEP, expected="valid YAML") from error
    except OSError as error:
        raise ConfigError(str(path), got=error.strerror, expected="a YAML configuration that can be read") from error
    if not isinstance(values, dict):
        raise ConfigError(str(path), got=type(values).__name__, expected="a mapping of sections")
    return values, dict(_lines(node))


def _files_in(folder: Path) -> str | None:
    """Return a hint that names the YAML files of a folder, or None if there are none."""
    files = sorted(str(path) for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
    more = f" or {len(files) - _MOST_FILES} more" if len(files) > _MOST_FILES else ""
    return f"give one of {', '.join(files[:_MOST_FILES])}{more}" if files else None


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
        raise together(_explain(error, source, schema)) from None


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
            raise ConfigError(f"{COMMAND_LINE}: {path}", got=f"{parent} is not a section", expected="a section")
    try:
        values[last] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        why = f" ({error.problem})" if isinstance(error, yaml.constructor.ConstructorError) else ""
        raise ConfigError(f"{COMMAND_LINE}: {path}", got=f"{text!r}{why}", expected="a YAML value") from error
    except RecursionError as error:
        raise ConfigError(f"{COMMAND_LINE}: {path}", got=_TOO_DEEP, expected="a YAML value") from error


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, of which YAML would silently keep the last, and joins surrogate pairs."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if not isinstance(value, str) or value.isascii():
            return value
        try:
            # JSON writes an emoji as a surrogate pair, which YAML reads as two characters.
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError as error:
            raise yaml.constructor.ConstructorError(None, None, f"half a surrogate pair in {value!a}", node.start_mark) from error

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
    every = error.errors()
    for one in every:
        if one["type"] == "too_short" and any(_within(other, one) for other in every):
            continue  # pydantic counts only the valid items
        made = _explained(one, source, schema)
        found.setdefault(made.what, made)  # a union reports a value once for each of its types
    return list(found.values())


def _within(one: ErrorDetails, other: ErrorDetails) -> bool:
    length = len(other["loc"])
    return len(one["loc"]) > length and one["loc"][:length] == other["loc"]


_KINDS: Mapping[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping of keys",
}
"""What pydantic's errors about a type expect, by the beginning of their name (`int_parsing`, `int_from_float`, ...)."""


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
        return ConfigError(f"{source.at(key.split('.'), expected)}: {key}", got=got, expected=expected)
    message = one["msg"]
    kind, _, fault = one["type"].partition("_")
    if kind in _KINDS and fault in ("type", "parsing", "from_float"):
        return ConfigError(what, got=repr(one["input"]), expected=_KINDS[kind])
    if one["type"] == "too_short":
        least = one["ctx"]["min_length"]
        return ConfigError(what, got=repr(one["input"]), expected=f"at least {least} item{'s' if least > 1 else ''}")
    if one["type"] == "path_type":
        return ConfigError(what, got=repr(one["input"]), expected="a path, which is text")
    expected = message.removeprefix("Input should be ")
    expected = expected if expected != message else message[:1].lower() + message[1:]
    return ConfigError(what, got=repr(one["input"]), expected=expected, hint=_meant(one))


def _meant(one: ErrorDetails) -> str | None:
    """Return the choice that a misspelt one most likely means, as a hint."""
    context = one.get("ctx", {})
    near = context.get("meant")
    if one["type"] == "literal_error" and isinstance(one["input"], str):
        near = nearest(one["input"], re.findall(r"'([^']*)'", str(context.get("expected", ""))))
    return f"did you mean {near}?" if near else None


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


def keys_named(name: str) -> list[str]:
    """Return the keys of a run's configuration whose path is `name` or ends in it, former ones by their present name."""
    known = {key: key for key in _keys(Config)} | dict(RENAMED)
    return list(dict.fromkeys(now for key, now in known.items() if key == name or key.rpartition(".")[2] == name))


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the path of every key of the schema but those of sections in a list or mapping, whose paths depend on the file."""
    for name, one in section.model_fields.items():
        yield prefix + name
        if get_origin(one.annotation) in (list, tuple, dict):
            continue
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
