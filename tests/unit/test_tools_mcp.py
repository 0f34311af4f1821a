"""MCP servers without the SDK: what a configuration refuses. tests/integrations/test_mcp.py has the rest."""

from __future__ import annotations

from typing import Any

import pytest

from asyncmoe import installed
from asyncmoe.config.environment import EnvironmentSection, ToolsSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.mcp import McpTools

NOT_SET = "NOT_SET_HERE"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, "command"),
        ({"command": "x", "url": "http://x"}, "command"),
        ({"command": ""}, "command"),
        ({"command": "x", "token_env": "T"}, "token_env"),
        ({"url": "stdio://x"}, "url"),
        ({"url": "http://me:secret@x/mcp"}, "url"),
        ({"url": "http://x", "args": ["-v"]}, "args"),
    ],
)
def test_what_a_server_s_keys_refuse(given: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a configuration, and from a user's own class."""
    monkeypatch.setattr(installed, "has", lambda module: True)
    with pytest.raises(ValueError, match=rf"environment\.tools\.mcp\.s\.{key}: got "):
        ToolsSection.model_validate({"mcp": {"s": given}})
    assert refused({"s": given}).what == f"environment.tools.mcp.s.{key}"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"comand": "cat"}, ".comand"),
        ({"command": "cat", "timeout_s": 0}, ".timeout_s"),
        ("cat", ""),
        ({"command": "sh", "env_from": [NOT_SET]}, ".env_from"),
        ({"url": "http://x", "token_env": NOT_SET}, ".token_env"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_run(given: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "has", lambda module: True)
    assert refused({"s": given}).what == f"environment.tools.mcp.s{key}"


def refused(servers: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        McpTools(servers)
    assert "\n" not in str(error.value)
    return error.value


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "has", lambda module: False)
    assert (refused({"s": {"command": "sh"}}).what, refused({"s": {"command": "sh"}}).got) == ("environment.tools.mcp", "no package mcp")


def test_servers_are_for_the_environment_of_tools() -> None:
    assert EnvironmentSection.model_validate({"kind": "tools", "tools": {"mcp": {"time": {"command": "mcp-server-time"}}}}).tools.mcp
    for wrong in (
        {"kind": "tools"},
        {"kind": "tools", "tools": {"mcp": {"a b": {"command": "x"}}}},
        {"tools": {"mcp": {"a": {"command": "x"}}}},
    ):
        with pytest.raises(ValueError, match=r"environment\.tools\.(names|mcp): got "):
            EnvironmentSection.model_validate(wrong)
