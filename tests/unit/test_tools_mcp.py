"""MCP servers without the SDK: what a configuration refuses, and the process of a server. tests/integrations/test_mcp.py has the rest."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncmoe import installed
from asyncmoe.config.environment import EnvironmentSection, ToolsSection
from asyncmoe.config.mcp import McpServer
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import loading
from asyncmoe.rollout.episodes.tools.mcp import McpTools, _McpTool, check_options, merged
from asyncmoe.rollout.episodes.tools.mcp import process as servers
from asyncmoe.rollout.episodes.tools.mcp.process import ServerProcess
from asyncmoe.rollout.episodes.tools.mcp.server import McpToolServer
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.tools.tool import ToolError

ENVIRONMENT = {"PATH": os.defpath}


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
        ({"command": "x\0"}, "zero byte"),
        ({"command": "x", "token_env": "T"}, "use env_from"),
        ({"command": "x", "env_from": ["A=1"]}, "got 'A=1', expected the name"),
        ({"command": "x", "env": {"": "1"}}, "got '', expected the name"),
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
        with pytest.raises(ValueError, match=r"environment\.sandbox: got the backend bubblewrap, expected no keys"):
            EnvironmentSection.model_validate({**other, "sandbox": {"backend": "bubblewrap"}})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"command": "sh", "url": "http://x"}, r"mcp\.s\.command: got both it and url"),
        ({"command": "/nowhere/server"}, r"mcp\.s\.command: got /nowhere/server, expected a program.*install it"),
        ({"command": "no-such-server"}, r"mcp\.s\.command: got no-such-server"),
        ({"command": "./README.md"}, r"mcp\.s\.command: got \./README\.md"),
        ({"command": "sh", "cwd": "/nowhere"}, r"mcp\.s\.cwd: got /nowhere, expected a directory"),
        ({"command": "sh", "env_from": ["NOT_SET_HERE"]}, r"mcp\.s\.env_from: got no variable NOT_SET_HERE"),
        ({"command": "sh", "env": {"PATH": "/nowhere"}}, r"mcp\.s\.command: got sh"),
        ({"url": "http://x", "token_env": "NOT_SET_HERE"}, r"mcp\.s\.token_env: got no variable NOT_SET_HERE"),
    ],
)
def test_what_cannot_be_reached_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        McpTools({"s": given})


@pytest.mark.parametrize(
    ("servers", "match"),
    [
        ({"mine": {"comand": "cat"}}, r"^environment\.tools\.mcp\.mine\.comand: got an unknown key, expected .*; did you mean command\?$"),
        ({"mine": {"command": "cat", "timeout_s": 0}}, r"^environment\.tools\.mcp\.mine\.timeout_s: got 0, expected .*0"),
        ({"mine": "cat"}, r"^environment\.tools\.mcp\.mine: got 'cat', expected a section"),
        ([1], r"^environment\.tools\.mcp: got \[1\], expected a mapping of servers by name"),
    ],
)
def test_wrong_keys_from_a_users_own_class_are_refused_in_one_line(servers: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as refused:
        McpTools(servers)
    assert "\n" not in str(refused.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "has", lambda module: False)
    with pytest.raises(ConfigError, match=r"environment\.tools\.mcp: got no package mcp, expected the extra mcp; run: .*\bmcp\b"):
        McpTools({"s": {"command": "sh"}})


def test_options_of_a_servers_tool_name_the_key_they_belong_to() -> None:
    keys = {"add": "environment.tools.mcp.mine"}
    said = r"options\.add: got a tool of an MCP server, expected its limits in environment\.tools\.mcp\.mine; set .*\.mcp\.mine\.timeout_s$"
    with pytest.raises(ConfigError, match=said):
        check_options({"add": {"timeout_s": 5, "concurrency": 2}}, keys)
    check_options({"python": {"wall_s": 1}}, keys)
    with pytest.raises(ConfigError, match=r"got no such tool, expected none because environment\.tools\.names"):
        loading.load([], {"ad": {}})


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
        def begun(self, server: McpToolServer) -> Session:
            return self

        async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
            return arguments

    current: ContextVar[Any] = ContextVar("sessions")
    current.set(Session())
    listed: Any = SimpleNamespace(name="add", description="", parameters={"type": "object", "properties": properties})
    return await _McpTool(McpToolServer("s", McpServer(command="sh")), listed, current).call(argument)


def ran(code: str, *sent: bytes) -> tuple[list[bytes], str, tuple[str, str] | None]:
    """The lines of a server that is a Python program, what is said of it, and its fault."""

    async def run() -> tuple[list[bytes], str, tuple[str, str] | None]:
        server = ServerProcess("s", (sys.executable, "-I", "-S", "-c", code), ENVIRONMENT)
        async with asyncio.timeout(60):
            await server.open()
            try:
                for line in sent:
                    await server.send(line)
                lines = [line async for line in server.lines()]
                await server.settled()
                return lines, server.state(), server.fault
            finally:
                await server.close()

    return asyncio.run(run())


def test_lines_arrive_whole_and_errors_are_told() -> None:
    code = "import sys\nprint(input() * 100000)\nprint()\nprint('b')\nprint('é, last', file=sys.stderr)\nsys.exit(7)"
    assert ran(code, "ab\u00e9".encode()) == ([("ab\u00e9" * 100000).encode(), b"b"], "ended with status 7; said: é, last", None)
    assert ran("import os\nos.kill(os.getpid(), 9)")[1] == "ended with SIGKILL"
    assert ran("raise SystemExit")[1] == "ended with status 0"


def test_a_missing_program_says_so() -> None:
    async def run() -> str:
        server = ServerProcess("s", ("/nowhere/x",), ENVIRONMENT)
        await server.open()
        assert [line async for line in server.lines()] == []
        await server.settled()
        try:
            return server.state()
        finally:
            await server.close()

    assert asyncio.run(run()) == "ended with status 127; said: /nowhere/x: No such file or directory"


def test_last_words_are_told_however_late_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ServerProcess._listen

    async def late(self: ServerProcess) -> None:
        await self._opened().wait()
        await asyncio.sleep(0.1)
        await real(self)

    monkeypatch.setattr(ServerProcess, "_listen", late)
    monkeypatch.setattr(servers, "_SETTLE_S", 30.0)
    assert ran("import sys\nsys.exit('no more')")[1] == "ended with status 1; said: no more"


@pytest.mark.parametrize("code", ["while True: print('x', end='')", "while True: print('xx')"])
def test_a_flood_ends_within_its_bound(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MAX_BYTES", 100_000)
    lines, _, fault = ran(code)
    assert fault == ("tool_flood", "wrote more than 100000 bytes for one request")
    assert sum(map(len, lines)) <= 100_000


def test_the_end_of_a_long_standard_error_is_kept_and_no_more() -> None:
    async def run() -> int:
        code = "import sys\nfor n in range(20000): print('x' * 99, n, file=sys.stderr)"
        server = ServerProcess("s", (sys.executable, "-I", "-S", "-c", code), ENVIRONMENT)
        await server.open()
        assert [line async for line in server.lines()] == []
        await server.settled()
        await asyncio.sleep(0.1)
        kept = sum(map(len, server._said))
        assert server.state().endswith(" 19999")
        await server.close()
        return kept

    assert asyncio.run(run()) < 20_000


def living(processes: list[int]) -> list[int]:
    return [process for process in processes if Path(f"/proc/{process}").exists()]


STUBBORN = """import os, signal, subprocess, sys, time
for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)
found = [os.getpid()]
for apart in (False, True):
    code = 'import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); '
    code += 'print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True); time.sleep(600)'
    child = subprocess.Popen([sys.executable, '-c', code], start_new_session=apart, stdout=subprocess.PIPE)
    found += [child.pid, int(child.stdout.readline())]
print(*found, flush=True)
time.sleep(600)
"""


def test_nothing_that_a_server_started_is_left() -> None:
    async def run() -> list[int]:
        server = ServerProcess("s", (sys.executable, "-c", STUBBORN), ENVIRONMENT)
        await server.open()
        async for line in server.lines():
            found = [int(word) for word in line.split()]
            break
        assert len(living(found)) == 5
        begin = time.monotonic()
        await server.close()
        assert time.monotonic() - begin < 15
        return living(found)

    assert asyncio.run(run()) == []


def test_a_server_that_stops_itself_is_ended() -> None:
    async def run() -> None:
        code = "import os, signal\nprint('x', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)"
        server = ServerProcess("s", (sys.executable, "-c", code), ENVIRONMENT)
        async with asyncio.timeout(30):
            await server.open()
            async for _ in server.lines():
                break
            await server.close()

    asyncio.run(run())
