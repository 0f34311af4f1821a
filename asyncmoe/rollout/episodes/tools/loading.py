"""Load the tools that a configuration names, and check their options."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncmoe import plugins
from asyncmoe.config.loading import section
from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.container import Container
from asyncmoe.rollout.episodes.tools.function import Function
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.tools.sandbox import Bubblewrap, PythonLimits, Sandbox, printed
from asyncmoe.rollout.episodes.tools.server import SandboxServer
from asyncmoe.rollout.episodes.tools.tool import ToolError

_OPTIONS = "environment.tools.options"


def load(
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    sandbox: SandboxSection | Mapping[str, Any] | None = None,
) -> dict[str, Runner]:
    """Return the tools that a configuration names, keyed by the names that a model uses in its calls.

    Args:
        names: "calculator", "python" or `package.module:function`.
        options: options of each tool, by the name in a model's calls: fields of `ToolLimits`, or for "python" of `PythonLimits`.
        sandbox: where the programs of "python" run, as environment.sandbox; None: in bubblewrap.

    Raises:
        ConfigError: a tool or option does not exist, two tools have the same name, or a tool cannot work on this machine.
    """
    given, runners = dict(options or {}), dict[str, Runner]()
    for target in names:
        if target == "python":
            limits = section(PythonLimits, given.pop(target, {}), f"{_OPTIONS}.{target}")
            made = python_tool(limits, section(SandboxSection, sandbox or {}, "environment.sandbox"))
        else:
            function = Function(target)
            made = function.under(section(ToolLimits, given.pop(function.name, {}), f"{_OPTIONS}.{function.name}"))
        if made.name in runners:
            raise ConfigError("environment.tools.names", got=f"two tools named {made.name}", expected="names that differ")
        runners[made.name] = made
    for name in given:
        near = plugins.nearest(name, runners)
        known = " or ".join(runners) or "none because environment.tools.names is empty"
        raise ConfigError(f"{_OPTIONS}.{name}", got="no such tool", expected=known, hint=f"did you mean {near}?" if near else None)
    return runners


def python_tool(limits: PythonLimits, where: SandboxSection) -> Runner:
    """Return the tool "python", after trying it with a program. Its calls raise as `printed`.

    Raises:
        ConfigError: the sandbox does not work here, or a limit is too small for any program.
    """
    sandbox = _sandbox(limits, where)

    async def python(code: str) -> str:
        """Runs a Python program and returns what it prints. Standard library only; no network."""
        return await printed(sandbox.run, code, limits)

    with ThreadPoolExecutor(1) as thread:  # with its own loop, because the caller may already be inside one
        try:
            got = thread.submit(asyncio.run, python("print(1)")).result()
        except ToolError as error:
            got = " ".join(error.detail.removeprefix("error: ").split())
    if got != "1\n":
        given = f", with {changed}" if (changed := limits.model_dump(exclude_unset=True)) else ""
        raise ConfigError("environment.sandbox", got=got + given, expected="a sandbox that runs print(1)", hint=sandbox.hint)
    return Function("python", python).under(limits)


def _sandbox(limits: PythonLimits, where: SandboxSection) -> Sandbox | SandboxServer:
    if where.url is not None:
        return SandboxServer(limits, where.url, where.token_env)
    return Bubblewrap(limits) if where.image is None else Container(limits, where.image)
