"""Tools that a model may call while it responds: a calculator, a sandboxed Python, a user's own functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.tools.tool import Tool


def load(names: Sequence[str], options: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Runner]:
    """Return the tools that a configuration names, keyed by the names that a model uses in its calls.

    Args:
        names: "calculator", "python" or `package.module:function`.
        options: options of each tool, by the same names: fields of `ToolLimits`, and for "python" also of `PythonLimits`.

    Raises:
        ConfigError: a tool or option does not exist, two tools have the same name, or a tool cannot work on this machine.
    """
    options = options or {}
    if unknown := set(options) - set(names):
        raise ConfigError("tools.options", got=", ".join(sorted(unknown)), expected=f"options of {', '.join(names)}")
    runners: dict[str, Runner] = {}
    for name in names:
        given = dict(options.get(name, {}))
        limits = _made(ToolLimits, {key: given.pop(key) for key in list(given) if key in _names(ToolLimits)}, name)
        runner = Runner(_tool(name, given), limits)
        if runner.name in runners:
            raise ConfigError("tools", got=f"two tools named {runner.name}", expected="names that differ")
        runners[runner.name] = runner
    return runners


def _tool(name: str, options: dict[str, Any]) -> Tool:
    from asyncmoe.rollout.episodes.tools import function
    from asyncmoe.rollout.episodes.tools.calculator import Calculator
    from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits, PythonTool

    if name == "python":
        return PythonTool(_made(PythonLimits, options, name))
    if options:
        raise ConfigError(f"tools.options.{name}", got=", ".join(options), expected=", ".join(_names(ToolLimits)))
    return Calculator() if name == "calculator" else function.load(name)


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)]


def _made(kind: type[Any], values: dict[str, Any], name: str) -> Any:
    """Construct `kind`, whose fields are positive numbers or booleans."""
    if unknown := set(values) - set(_names(kind)):
        expected = ", ".join(dict.fromkeys((*_names(kind), *_names(ToolLimits))))
        raise ConfigError(f"tools.options.{name}", got=", ".join(sorted(unknown)), expected=expected)
    defaults = kind()
    for key, value in values.items():
        default = getattr(defaults, key)
        if isinstance(default, bool):
            right, expected = isinstance(value, bool), "true or false"
        else:
            right = isinstance(value, int if isinstance(default, int) else (int, float)) and not isinstance(value, bool) and value > 0
            expected = "a positive whole number" if isinstance(default, int) else "a positive number"
        if not right:
            raise ConfigError(f"tools.options.{name}.{key}", got=repr(value), expected=expected)
    return kind(**values)
