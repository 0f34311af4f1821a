"""How to reach an MCP server, from its keys in the configuration and this process's environment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncmoe.config.mcp import McpServer
from asyncmoe.errors import ConfigError

KEY = "environment.tools.mcp"
_INHERITED = ("HOME", "LANG", "PATH", "USER")


@dataclass(frozen=True)
class McpToolServer:
    """How to reach a server.

    Attributes:
        name: its name in the configuration.
        section: its keys.
        environment: all variables of its command.
        token: bearer token of its URL.
        mode: how a session begins, the SDK's `Client.mode`: "legacy" is `initialize`; "auto" is for servers that refuse it.
    """

    name: str
    section: McpServer
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str | None = field(default=None, repr=False)
    mode: str = "legacy"


def resolve(name: str, section: McpServer) -> McpToolServer:
    """Return how to reach a server.

    Raises:
        ConfigError: its keys do not fit each other, or its command, directory or a variable does not exist.
    """
    key = f"{KEY}.{name}"
    if (problem := section.problem()) is not None:
        wrong, got, expected = problem
        raise ConfigError(f"{key}.{wrong}", got=got, expected=expected)
    wanted = (*section.env_from, *([] if section.token_env is None else [section.token_env]))
    if missing := [variable for variable in wanted if variable not in os.environ]:
        which = "token_env" if missing == [section.token_env] else "env_from"
        raise ConfigError(f"{key}.{which}", got=f"no variable {missing[0]} in the environment", expected="it to be set", hint="export it")
    token = None if section.token_env is None else os.environ[section.token_env]
    environment = {name: os.environ[name] for name in (*_INHERITED, *section.env_from) if name in os.environ} | dict(section.env)
    if section.cwd is not None and not os.path.isdir(section.cwd):
        raise ConfigError(f"{key}.cwd", got=section.cwd, expected="a directory that exists")
    if section.command is not None and _program(section, environment) is None:
        raise ConfigError(
            f"{key}.command", got=section.command, expected="a program that can be executed", hint="install it, or give its path"
        )
    return McpToolServer(name, section, environment, token)


def _program(section: McpServer, environment: Mapping[str, str]) -> str | None:
    assert section.command is not None
    named = section.command
    if "/" in named and not named.startswith("/"):
        named = os.path.join(section.cwd or ".", named)
    return shutil.which(named, path=environment.get("PATH", os.defpath))
