"""MCP servers without the SDK: refused configurations. tests/integrations/test_mcp.py has the rest."""

from __future__ import annotations

from typing import Any

import pytest

from asyncmoe import installed
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.mcp import McpTools
from tests.configs import minimal

NOT_SET = "NOT_SET_HERE"


def configured(**environment: Any) -> Any:
    """The environment of a run."""
    return minimal(environment=environment).environment


def refused(servers: Any) -> ConfigError:
    """By a user's own class."""
    with pytest.raises(ConfigError) as error:
        McpTools(servers)
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, "command"),
        ({"command": "x", "url": "http://x"}, "command"),
        ({"command": "x", "token_env": "T"}, "token_env"),
        ({"url": "http://me:secret@x/mcp"}, "url"),
        ({"url": "http://x", "args": ["-v"]}, "args"),
        ({"comand": "cat"}, "comand"),
        ({"command": "cat", "timeout_s": 0}, "timeout_s"),
    ],
)
def test_what_a_servers_keys_refuse(given: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "has", lambda module: True)
    with pytest.raises(ConfigError, match=rf"environment\.tools\.mcp\.s\.{key}: got "):
        configured(kind="tools", tools={"mcp": {"s": given}})
    assert refused({"s": given}).what == f"environment.tools.mcp.s.{key}"


def test_what_cannot_be_used_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "has", lambda module: True)
    assert refused({"s": {"command": "sh", "env_from": [NOT_SET]}}).what == "environment.tools.mcp.s.env_from"
    assert refused({"s": {"url": "http://x", "token_env": NOT_SET}}).what == "environment.tools.mcp.s.token_env"
    monkeypatch.setattr(installed, "has", lambda module: False)
    assert refused({"s": {"command": "sh"}}).got == "no package mcp"
