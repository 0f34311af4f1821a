"""Load the tools that a configuration names, and check their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe import plugins
from asyncmoe.config.loading import section
from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import function
from asyncmoe.rollout.episodes.tools.calculator import Calculator
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes import python_tool

_OPTIONS = "environment.tools.options"


class _PythonOptions(ToolLimits, PythonLimits):
    """Options of the tool "python"."""


def load(
    names: Sequence[str], options: Mapping[str, Mapping[str, Any]] | None = None, sandbox: SandboxSection | None = None
) -> dict[str, Runner]:
    """Return the tools that a configuration names, keyed by the names that a model uses in its calls.

    Args:
        names: "calculator", "python" or `package.module:function`.
        options: options of each tool, by the name in a model's calls: fields of `ToolLimits`, and for "python" also of `PythonLimits`.
        sandbox: where the programs of "python" run; None: the default.

    Raises:
        ConfigError: a tool or option does not exist, two tools have the same name, or a tool cannot work on this machine.
    """
    runners: dict[str, Runner] = {}
    for target in names:
        own = None if target in ("calculator", "python") else function.load(target)
        name = target if own is None else own.name
        if name in runners:
            raise ConfigError("environment.tools.names", got=f"two tools named {name}", expected="names that differ")
        given = (options or {}).get(name, {})
        if target == "python":
            limits = section(_PythonOptions, given, f"{_OPTIONS}.python")
            runners[name] = Runner(python_tool(PythonLimits(**limits.model_dump(include=set(PythonLimits.model_fields))), sandbox), limits)
        else:
            runners[name] = Runner(own or Calculator(), section(ToolLimits, given, f"{_OPTIONS}.{name}"))
    for name in set(options or {}) - set(runners):
        near = plugins.nearest(name, runners)
        known = " or ".join(runners) or "none because environment.tools.names is empty"
        hint = f"did you mean {near}?" if near else None
        raise ConfigError(f"{_OPTIONS}.{name}", got="no such tool", expected=known, hint=hint)
    return runners
