"""The user's own tasks, scorers, environments, agents and tools, and the packages that they need: whether they can be found.

Nothing is imported here: what such code does when it is tried, `asyncmoe config validate` says.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from asyncmoe import installed, plugins
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, UserError, together

_VERIFIERS = "asyncmoe.rollout.adapters.verifiers:"


def named(config: Config) -> dict[str, str]:
    """Return the user's own code by the key that names it; the objective's and the model family are in `plugin_probe.named`."""
    task, environment = config.task, config.environment
    wanted = {
        "task.kind": task.kind,
        "task.filter": task.filter,
        "scoring.scorer": config.scoring.scorer,
        "environment.kind": environment.kind,
        "environment.agent": environment.agent,
        "environment.tools.names": ", ".join(name for name in environment.tools.names if plugins.is_name(name)),
        **{f"evaluation.sets.{name}.kind": one.kind for name, one in config.evaluation.sets.items()},
    }
    return {key: target for key, target in wanted.items() if target and plugins.is_name(target.partition(", ")[0])}


def check(config: Config) -> None:
    """Look for everything, before a run starts in this directory.

    Raises:
        UserError: something cannot be found; a line each.
    """
    wrong: list[UserError] = []
    for key, targets in named(config).items():
        for target in targets.split(", "):
            module = target.partition(".")[0].partition(":")[0]
            if target.startswith(_VERIFIERS) and not installed.has("verifiers"):
                wrong.append(installed.absent("verifiers", key))
            elif not _found(module):
                wrong.append(ConfigError(key, got=f"{target}, and no module {module}", expected="a module in this directory or PYTHONPATH"))
    if config.environment.tools.mcp and not installed.has("mcp"):
        wrong.append(installed.absent("mcp", "environment.tools.mcp"))
    if wrong:
        raise together(wrong)


def _found(module: str) -> bool:
    """Return whether a run finds a top-level module: its processes look in the working directory first."""
    return module in sys.modules or PathFinder.find_spec(module, [str(Path.cwd())]) is not None or installed.has(module)
