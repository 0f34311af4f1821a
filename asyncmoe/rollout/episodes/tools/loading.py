"""Load the tools that a configuration names, and check their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import function
from asyncmoe.rollout.episodes.tools.calculator import Calculator
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes import python_tool
from asyncmoe.rollout.episodes.tools.tool import Tool

_BUILT_IN = ("calculator", "python")


def load(
    names: Sequence[str], options: Mapping[str, Mapping[str, Any]] | None = None, sandbox: SandboxSection | None = None
) -> dict[str, Runner]:
    """Return the tools that a configuration names, keyed by the names that a model uses in its calls.

    Args:
        names: "calculator", "python" or `package.module:function`.
        options: options of each tool, by the name in a model's calls or in `names`: fields of `ToolLimits`, and for "python" also of
            `PythonLimits`.
        sandbox: where the programs of "python" run; None: the default.

    Raises:
        ConfigError: a tool or option does not exist, two tools have the same name, or a tool cannot work on this machine.
    """
    tools = {name: None if name in _BUILT_IN else function.load(name) for name in names}
    by_target = _by_target(options or {}, {target: target if tool is None else tool.name for target, tool in tools.items()})
    runners: dict[str, Runner] = {}
    for target in names:
        key, given = by_target[target]
        limits = _made(ToolLimits, {name: given.pop(name) for name in list(given) if name in _names(ToolLimits)}, key)
        runner = Runner(_tool(target, tools[target], given, key, sandbox), limits)
        if runner.name in runners:
            raise ConfigError("environment.tools.names", got=f"two tools named {runner.name}", expected="names that differ")
        runners[runner.name] = runner
    return runners


def _by_target(options: Mapping[str, Mapping[str, Any]], named: Mapping[str, str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return {target: (key in the configuration, options)}.

    Args:
        named: {target: name that a model uses}.
    """
    expected = [name for target, name in named.items() for name in dict.fromkeys((name, target))]
    for key in options:
        if key not in expected:
            near = get_close_matches(key, expected, 1)
            hint = f"did you mean {near[0]}?" if near else None
            known = " or ".join(expected) or "none because environment.tools.names is empty"
            raise ConfigError(f"environment.tools.options.{key}", got="no such tool", expected=known, hint=hint)
    for target, name in named.items():
        if target != name and {target, name} <= set(options):
            raise ConfigError(f"environment.tools.options.{name}", got=f"the same tool as {target}", expected="options of a tool once")
    keys = {target: next((key for key in (name, target) if key in options), name) for target, name in named.items()}
    return {target: (key, dict(options.get(key, {}))) for target, key in keys.items()}


def _tool(target: str, own: Tool | None, options: dict[str, Any], key: str, sandbox: SandboxSection | None) -> Tool:
    if target == "python":
        return python_tool(_made(PythonLimits, options, key), sandbox)
    if options:
        expected = ", ".join(_names(ToolLimits))
        near = get_close_matches(min(options), _names(ToolLimits), 1)
        hint = f"did you mean {near[0]}?" if near else None
        raise ConfigError(f"environment.tools.options.{key}", got=", ".join(options), expected=expected, hint=hint)
    return Calculator() if own is None else own


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)]


def _made(kind: type[Any], values: dict[str, Any], name: str) -> Any:
    """Construct `kind`, whose fields are positive numbers or booleans."""
    if unknown := set(values) - set(_names(kind)):
        expected = ", ".join(dict.fromkeys((*_names(kind), *_names(ToolLimits))))
        raise ConfigError(f"environment.tools.options.{name}", got=", ".join(sorted(unknown)), expected=expected)
    defaults = kind()
    for key, value in values.items():
        default = getattr(defaults, key)
        if isinstance(default, bool):
            right, expected = isinstance(value, bool), "true or false"
        else:
            right = isinstance(value, int if isinstance(default, int) else (int, float)) and not isinstance(value, bool) and value > 0
            expected = "a positive whole number" if isinstance(default, int) else "a positive number"
        if not right:
            raise ConfigError(f"environment.tools.options.{name}.{key}", got=repr(value), expected=expected)
    return kind(**values)
