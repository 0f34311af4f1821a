"""MCP servers without the SDK: what a configuration refuses, and the arguments of calls. tests/integrations/test_mcp.py has the rest."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from asyncmoe import installed
from asyncmoe.config.environment import EnvironmentSection, ToolsSection
from asyncmoe.config.mcp import McpServer
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.mcp import McpTools, _McpTool, _Server, merged
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.tools.tool import ToolError


class Named:
    description, parameters = "", {}

    def __init__(self, name: str) -> None:
        self.name = name

    async def call(self, argument: str) -> str:
        return argument

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, r"environment\.tools\.mcp\.s\.command: got neither it nor url, expected one of them"),
        ({"command": "x", "url": "http://x"}, "command: got both it and url"),
        ({"command": ""}, "command: got nothing"),
        ({"command": "x", "token_env": "T"}, "use env_from"),
        ({"url": "stdio://x"}, "got 'stdio://x', expected http"),
        ({"url": "http://me:secret@x/mcp"}, "use a variable|token_env"),
        ({"url": "http://x", "args": ["-v"]}, "args: got a value, expected none"),
        ({"command": "x", "timeout_s": 0}, "greater than 0"),
        ({"command": "x", "shell": True}, "Extra inputs"),
    ],
)
def test_what_a_server_s_keys_refuse(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ToolsSection.model_validate({"mcp": {"s": given}})


def test_a_server_is_enough_for_the_environment_of_tools() -> None:
    assert EnvironmentSection.model_validate({"kind": "tools", "tools": {"mcp": {"time": {"command": "mcp-server-time"}}}}).tools.mcp
    with pytest.raises(ValueError, match=r"name a server in environment\.tools\.mcp"):
        EnvironmentSection(kind="tools")
    with pytest.raises(ValueError, match="got the name 'a b', expected letters"):
        EnvironmentSection.model_validate({"kind": "tools", "tools": {"mcp": {"a b": {"command": "x"}}}})
    with pytest.raises(ValueError, match=r"environment\.tools\.mcp: got servers, expected none because environment\.kind is single_turn"):
        EnvironmentSection.model_validate({"tools": {"mcp": {"a": {"command": "x"}}}})
    for other in ({"kind": "mine:Own"}, {"kind": "tools", "tools": {"names": ["calculator"]}}):
        with pytest.raises(ValueError, match=r"environment\.sandbox: got keys, expected no keys"):
            EnvironmentSection.model_validate({**other, "sandbox": {"image": "i"}})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"command": "sh", "url": "http://x"}, r"mcp\.s\.command: got both it and url"),
        ({"command": "sh", "env_from": ["NOT_SET_HERE"]}, r"mcp\.s\.env_from: got no variable NOT_SET_HERE"),
        ({"url": "http://x", "token_env": "NOT_SET_HERE"}, r"mcp\.s\.token_env: got no variable NOT_SET_HERE"),
    ],
)
def test_what_cannot_be_reached_is_refused(given: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "has", lambda module: True)
    with pytest.raises(ConfigError, match=match):
        McpTools({"s": given})


@pytest.mark.parametrize(
    ("servers", "match"),
    [
        ({"mine": {"comand": "cat"}}, r"^environment\.tools\.mcp\.mine\.comand: got an unknown key, expected .*; did you mean command\?$"),
        ({"mine": {"command": "cat", "timeout_s": 0}}, r"^environment\.tools\.mcp\.mine\.timeout_s: got 0, expected .*0"),
        ({"mine": "cat"}, r"^environment\.tools\.mcp\.mine: got 'cat', expected a section"),
    ],
)
def test_wrong_keys_from_a_users_own_class_are_refused_in_one_line(servers: Any, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "has", lambda module: True)
    with pytest.raises(ConfigError, match=match) as refused:
        McpTools(servers)
    assert "\n" not in str(refused.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "has", lambda module: False)
    with pytest.raises(ConfigError, match=r"environment\.tools\.mcp: got no package mcp, expected the extra mcp; run: .*\bmcp\b"):
        McpTools({"s": {"command": "sh"}})


def test_names_of_tools_do_not_collide() -> None:
    own, other = ({name: Runner(Named(name), ToolLimits())} for name in ("capital", "get-sum"))
    assert list(merged(own, other, "hermes")) == ["capital", "get-sum"]
    with pytest.raises(ConfigError, match=r"a tool named get-sum, expected letters.*use hermes"):
        merged(own, other, "brackets")
    with pytest.raises(ConfigError, match=r"a tool named capital, like one of environment\.tools\.names"):
        merged(own, own, "hermes")


BAD = ['{"a": "\\ud800"}', '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e400}', '{"a": {"b": [1, 1e400]}}', '{"\\ud800": 1}']


@pytest.mark.parametrize("argument", BAD)
def test_arguments_that_no_server_can_be_told_are_an_observation(argument: str) -> None:
    """The SDK's session ended with them, without a word to those who wait for an answer."""
    with pytest.raises(ToolError, match=r"^tool_error: error: arguments of add that are not valid JSON: ") as refused:
        asyncio.run(told(argument, {"a": {"type": "number"}, "b": {"type": "number"}}))
    assert str(refused.value).isascii()


def test_arguments_of_an_mcp_tool_reach_its_session() -> None:
    assert asyncio.run(told('{"a": "\\ud83d\\ude00", "b": 1e300}', {})) == {"a": "\U0001f600", "b": 1e300}
    assert asyncio.run(told("NaN", {"a": {"type": "string"}})) == {"a": "NaN"}
    with pytest.raises(ToolError, match=r"not valid JSON"):
        asyncio.run(told("NaN", {"a": {"type": "number"}}))


async def told(argument: str, properties: dict[str, Any]) -> Any:
    """The arguments with which a session is called."""

    class Session:
        async def of(self, server: object) -> Session:
            return self

        async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
            return arguments

    current: ContextVar[Any] = ContextVar("sessions")
    current.set(Session())
    listed: Any = SimpleNamespace(name="add", description="", input_schema={"type": "object", "properties": properties})
    return await _McpTool(_Server("s", McpServer(command="sh")), listed, current).call(argument)
