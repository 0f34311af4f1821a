"""MCP servers as tools, with the official SDK: servers as their authors publish them, and servers that hang, die or answer rubbish.

make test-integrations ONLY=mcp
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncmoe.config.mcp import McpServer
from asyncmoe.errors import ConfigError, TrajectoryRejected
from asyncmoe.launch.torchrun import free_port
from asyncmoe.rollout.episodes.environments.tools import WithTools
from asyncmoe.rollout.episodes.tools.mcp import McpTools
from asyncmoe.rollout.episodes.tools.runner import Runner
from asyncmoe.rollout.episodes.tools.tool import ToolError
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.integrations.servers import serving
from tests.system.runs import wait_for
from tests.unit.test_environment_tools import parts
from tests.unit.test_environment_tools import play as play_episode

pytest.importorskip("mcp", reason="make test-integrations ONLY=mcp installs mcp")
ROGUE = str(Path(__file__).with_name("rogue_mcp.py"))
BIN = Path(sys.executable).parent


def rogue(*arguments: str, **keys: Any) -> dict[str, McpServer]:
    keys = {"timeout_s": 20.0, "start_timeout_s": 20.0, **keys}
    return {"rogue": McpServer(command=sys.executable, args=("-I", "-S", ROGUE, *arguments), **keys)}


def play(servers: dict[str, McpServer], then: Callable[[dict[str, Runner]], Awaitable[None]], sessions: int = 64) -> McpTools:
    """Run one episode."""

    async def run() -> McpTools:
        tools = McpTools(servers, sessions)
        try:
            async with asyncio.timeout(60), tools.episode():
                await then(tools.runners)
        finally:
            await tools.close()
        return tools

    return asyncio.run(run())


async def told(runner: Runner, argument: str) -> str:
    try:
        return await runner.call(argument)
    except ToolError as error:
        return f"{error.reason}: {error.detail}"


def living(file: Path) -> list[int]:
    """Processes noted in the file that have not ended."""
    found = []
    for pid in map(int, file.read_text().splitlines()):
        with suppress(psutil.NoSuchProcess):
            found += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
    return found


def gone(file: Path) -> bool:
    return wait_for(lambda: not living(file), 10, 0.02)


def test_a_published_server_answers_in_a_session(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=30)
    servers = {
        "time": McpServer(command=str(BIN / "mcp-server-time")),
        "git": McpServer(command=str(BIN / "mcp-server-git"), args=("--repository", str(tmp_path)), tools=("git_status", "git_branch")),
    }

    async def then(runners: dict[str, Runner]) -> None:
        assert list(runners) == ["get_current_time", "convert_time", "git_status", "git_branch"]
        assert runners["get_current_time"].schema["function"]["parameters"]["required"] == ["timezone"]
        assert '"timezone": "UTC"' in await runners["get_current_time"].call('{"timezone": "UTC"}')
        assert "No time zone found" in await told(runners["get_current_time"], '{"timezone": "Mars"}')
        assert (await told(runners["get_current_time"], '{"tz": "UTC"}')).startswith("tool_error: ")
        assert "nothing to commit" in await runners["git_status"].call(f'{{"repo_path": "{tmp_path}"}}')

    tools = play(servers, then)
    counts = tools.runners["get_current_time"].counts
    assert (counts.calls, dict(counts.failures)) == (3, {"tool_error": 2})


def test_a_session_lasts_an_episode() -> None:
    async def run() -> None:
        tools = McpTools(rogue())

        async def episode() -> list[str]:
            async with tools.episode():
                return [await tools.runners["count"].call("{}") for _ in range(3)]

        assert await asyncio.gather(*(episode() for _ in range(4))) == [["1", "2", "3"]] * 4
        with pytest.raises(RuntimeError, match="outside an episode"):
            await tools.runners["count"].call("{}")
        await tools.close()

    asyncio.run(run())


CALLS = {
    "refuse": "tool_error: error: not like this",
    "fail": "tool_error: it failed",
    "picture": "[image/png]",
    "structure": '{"a": "é"}',
    "long": "tool_flood: xxx",
    "die": "tool_crash: error: the MCP server rogue did not answer a call of act: Connection closed; it said: out of luck",
    "close": "tool_crash: error: the MCP server rogue did not answer a call of act: Connection closed",
    "hang": "tool_timeout: error: act took longer than 2 s",
    "rubbish": "tool_timeout: error: act took longer than 2 s",
    "flood": "tool_timeout: error: act took longer than 2 s",
    "wrong": "tool_crash: error: the MCP server rogue did not answer a call of act: ",
}


@pytest.mark.parametrize("how", CALLS)
def test_a_call_that_goes_wrong(how: str, tmp_path: Path) -> None:
    async def then(runners: dict[str, Runner]) -> None:
        said = await told(runners["act"], f'{{"how": "{how}"}}')
        assert said.startswith(CALLS[how])
        assert len(said) < 20_000

    timeout_s = 2.0 if CALLS[how].startswith("tool_timeout") else 20.0
    tools = play(rogue("", str(tmp_path / "file"), timeout_s=timeout_s), then)
    assert sum(tools.runners["act"].counts.failures.values()) == (how not in ("picture", "structure"))
    assert gone(tmp_path / "file")


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("hang", "rogue took longer than 1 s to begin a session"),
        ("die", "rogue did not begin a session: Connection closed; it said: out of luck, expected an MCP server"),
        ("flood", "took longer than 1 s"),
        ("rubbish", "took longer than 1 s"),
    ],
)
def test_a_server_that_does_not_begin_is_refused_before_the_run(how: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match) as refused:
        McpTools(rogue(f"start:{how}", str(tmp_path / "file"), start_timeout_s=1.0 if "1 s" in match else 30.0))
    assert "\n" not in str(refused.value)
    assert gone(tmp_path / "file")


def test_a_command_that_cannot_be_started_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mcp\.s: got the MCP server s did not begin a session: .*'/nowhere/server'"):
        McpTools({"s": {"command": "/nowhere/server"}})


def test_a_server_that_fails_later_costs_the_episodes_call(tmp_path: Path) -> None:
    """It is asked for its tools while it is well, and then it is gone."""
    script = tmp_path / "server.py"
    script.write_text(Path(ROGUE).read_text())
    servers = {"rogue": McpServer(command=sys.executable, args=("-I", "-S", str(script)))}

    async def then(runners: dict[str, Runner]) -> None:
        script.unlink()
        assert (await told(runners["act"], '{"how": "x"}')).startswith("tool_crash: error: the MCP server rogue did not ")
        assert (await told(runners["count"], "{}")).startswith("tool_crash: "), "and is not started again in this episode"

    tools = play(servers, then)
    assert dict(tools.runners["act"].counts.failures) == {"tool_crash": 1}


def test_a_server_does_not_outlive_a_cancelled_episode(tmp_path: Path) -> None:
    async def run() -> None:
        tools = McpTools(rogue("", str(tmp_path / "file")))

        async def episode() -> None:
            async with tools.episode():
                await tools.runners["act"].call('{"how": "hang"}')

        running = asyncio.create_task(episode())
        while not (tmp_path / "file").exists() or not living(tmp_path / "file"):
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await tools.close()

    asyncio.run(run())
    assert not living(tmp_path / "file")


def test_sessions_are_bounded_and_further_episodes_wait(tmp_path: Path) -> None:
    file = tmp_path / "file"

    async def run() -> int:
        tools, most = McpTools(rogue("", str(file)), sessions=2), 0

        async def episode() -> None:
            nonlocal most
            async with tools.episode():
                await tools.runners["act"].call('{"how": "x"}')
                most = max(most, len(living(file)))
                await asyncio.sleep(0.05)

        await asyncio.gather(*(episode() for _ in range(8)))
        await tools.close()
        return most

    assert asyncio.run(run()) == 2
    assert len(file.read_text().split()) == 9, "one to list the tools, and one an episode"


def test_a_command_gets_no_variable_that_is_not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "xyzzy")
    monkeypatch.setenv("A_TOKEN", "t")

    async def then(runners: dict[str, Runner]) -> None:
        names = set((await runners["act"].call('{"how": "variables"}')).split())
        assert {"A_TOKEN", "MORE", "PATH"} <= names <= {"A_TOKEN", "MORE", "PATH", "HOME", "LOGNAME", "SHELL", "TERM", "USER", "LC_CTYPE"}

    play(rogue(env={"MORE": "1"}, env_from=("A_TOKEN",)), then)


def test_names_and_choices(tmp_path: Path) -> None:
    both = {"a": rogue()["rogue"], "b": rogue(prefix="b_")["rogue"]}

    async def then(runners: dict[str, Runner]) -> None:
        assert list(runners) == ["act", "count", "b_act", "b_count"]
        assert await asyncio.gather(runners["count"].call("{}"), runners["b_count"].call("{}")) == ["1", "1"]
        assert await runners["act"].call("plain words") == "plain words"
        assert (await told(runners["count"], "plain words")).startswith("tool_error: error: the arguments of count must be a JSON object")

    play(both, then)
    with pytest.raises(ConfigError, match=r"mcp\.b: got two tools named act.*prefix"):
        McpTools({"a": both["a"], "b": both["a"]})
    with pytest.raises(ConfigError, match=r"mcp\.rogue\.tools: got nothing, expected some of act, count"):
        McpTools(rogue(tools=("nothing",)))
    with pytest.raises(ConfigError, match="mcp_sessions: got 1, expected at least 2"):
        McpTools(both, 1)


def test_an_episode_asks_a_server_and_a_server_that_dies_rejects_it(known: Tokenizer) -> None:
    calls = [f'<tool_call>{{"name": "act", "arguments": {{"how": "{how}"}}}}</tool_call>' for how in ("fine", "fail", "die")]
    made = play_episode(WithTools((), "hermes", chat=False, mcp=rogue()), known, calls[0], calls[1] * 2, "42")
    assert [text for sampled, text in parts(made, known) if not sampled] == ["6*7=", "fine\n", "it failed\nit failed\n"]
    environment = WithTools(("calculator",), "hermes", chat=False, mcp=rogue())
    with pytest.raises(TrajectoryRejected, match=r"tool_crash: error: the MCP server rogue .*it said: out of luck"):
        play_episode(environment, known, calls[0] + calls[2])
    assert dict(environment.counts["act"].failures) == {"tool_crash": 1}
    assert list(environment.counts) == ["calculator", "act", "count"]


HTTP = """
import sys
from mcp.server.mcpserver import Context, MCPServer
server = MCPServer("counter")
seen = {}

@server.tool()
def count(ctx: Context) -> str:
    key = ctx.headers["mcp-session-id"]
    seen[key] = seen.get(key, 0) + 1
    return str(seen[key])

@server.tool()
def long(size: int) -> str:
    return "x" * size

@server.tool()
async def hang() -> str:
    import anyio
    await anyio.sleep(600)

@server.tool()
def die() -> str:
    import os
    os._exit(1)

server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
"""


@pytest.fixture
def http(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "server.py").write_text(HTTP)
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}/mcp"
    with serving([sys.executable, str(tmp_path / "server.py"), str(port)], url, 60):
        yield url


def test_a_server_behind_a_url(http: str) -> None:
    async def then(runners: dict[str, Runner]) -> None:
        assert await runners["long"].call('{"size": 3}') == "xxx"
        assert (await told(runners["long"], '{"size": "many"}')).startswith("tool_error: ")
        assert (await told(runners["hang"], "{}")) == "tool_timeout: error: hang took longer than 2 s"
        assert (await told(runners["long"], '{"size": 100000}')).startswith("tool_flood: xxx")

    async def last(runners: dict[str, Runner]) -> None:
        assert [await runners["count"].call("{}") for _ in range(2)] == ["1", "2"]
        assert (await told(runners["die"], "{}")).startswith("tool_crash: error: the MCP server counter did not ")

    servers = {"counter": McpServer(url=http, timeout_s=2.0)}
    play(servers, then)
    play(servers, last)
    with pytest.raises(ConfigError, match=r"mcp\.counter: got the MCP server counter did not begin a session: "):
        McpTools(servers)


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "did not begin a session: Server returned an error response"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi", "Unexpected content type: text/html"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}", "no MCP|Failed to parse"),
        (b"HTTP/1.1 302 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "Redirect to http"),
        (b"", "took longer than 1 s"),
    ],
)
def test_a_url_that_is_no_mcp_server(reply: bytes, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_TOKEN", "xyzzy")
    asked: list[bytes] = []

    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(reply)
            try:
                await writer.drain()
                await asyncio.sleep(0.3 if reply else 30)
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        section = McpServer(url=url, start_timeout_s=1.0, token_env="MCP_TOKEN")
        with pytest.raises(ConfigError, match=match) as refused:
            await asyncio.to_thread(McpTools, {"counter": section})
        assert "\n" not in str(refused.value)
        assert "xyzzy" not in str(refused.value)
        server.close()

    asyncio.run(run())
    assert b"uthorization: Bearer xyzzy\r\n" in asked[0]
