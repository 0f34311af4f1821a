"""A server that replaces bubblewrap responds within bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import server
from asyncmoe.rollout.episodes.tools.loading import python_tool
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.tool import ToolError
from examples.agents import sandbox_server
from tests.unit.test_tools_sandbox import LIMITS, limited
from tests.unit.test_tools_sandbox import pytestmark as BUBBLEWRAP


async def called(code: str, section: SandboxSection, limits: PythonLimits = LIMITS) -> str:
    """What it printed, the reason and the detail why there is no result, or why there is no tool."""
    try:
        tool = await asyncio.to_thread(python_tool, limits, section)
        return await tool.call(json.dumps({"code": code}))
    except ToolError as error:
        return f"{error.reason}: {error.detail}"
    except ConfigError as error:
        return str(error)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def served(then: Callable[[SandboxSection], Awaitable[None]], handler: Handler | None = None) -> None:
    """Serve a handler, or the example's server, while `then` runs with its section."""

    async def both() -> None:
        application = sandbox_server.application("xyzzy")
        if handler is not None:
            application = web.Application()
            application.router.add_post("/run", handler)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with asyncio.timeout(60):
                await then(SandboxSection(url=f"http://127.0.0.1:{runner.addresses[0][1]}/run", token_env="SANDBOX_TOKEN"))
        finally:
            await runner.cleanup()

    asyncio.run(both())


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TOKEN", "xyzzy")


@BUBBLEWRAP
def test_a_server_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's server, with bubblewrap behind it."""

    async def then(section: SandboxSection) -> None:
        limits = limited(wall_s=20.0)
        assert await called("print('é\\x00')", section, limits) == "é\x00\n"
        assert (await called("1/0", section, limits)).rstrip().endswith("ZeroDivisionError: division by zero")
        assert await called("while True: print('x')", section, limited(output_bytes=4)) == "tool_flood: x\nx\n\n[cut at 4 bytes]"
        killed = "import os\nos.kill(os.getpid(), 40)"
        assert await called(killed, section, limits) == "tool_killed: error: the program was ended by signal 40"
        text = await called("import time\ntime.sleep(60)", section, limited(wall_s=0.5))
        assert text == "tool_timeout: error: the program took longer than 0.5 s"
        assert "status 400: limits above" in await called("1", section, limited(wall_s=3601.0))
        monkeypatch.setenv("SANDBOX_TOKEN", "wrong")
        assert f"environment.sandbox: got {section.url}: status 401: wrong token" in await called("1", section)

    served(then)


def answering(*answers: web.Response) -> Handler:
    """A server that answers so, one request after the other; the first is that for the trial of the sandbox."""
    left = [web.json_response({"output": "1\n"}), *answers]

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        return left.pop(0)

    return handler


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"hello", "not of the protocol"),
        (b'{"output": "", "status": -9999}', "not of the protocol"),
        (b"[" * 90000, "not of the protocol"),
        (b'{"output": "\xff"}', "not of the protocol"),
        (b'{"output": "' + b"x" * 200_000 + b'"}', "answered with more than"),
        (b'{"output": "' + b"x" * 20_000 + b'"}', "tool_flood"),
    ],
)
def test_what_a_server_may_answer(body: bytes, match: str) -> None:
    async def then(section: SandboxSection) -> None:
        text = await called("x", section)
        assert match in text
        assert text.startswith("tool_")
        assert len(text) < 20_000

    served(then, answering(web.Response(body=body, content_type="application/json")))


def test_a_program_is_posted_again_only_if_none_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beyond three times, and not before the server says so."""
    seen: list[dict[str, object]] = []
    times: list[float] = []
    later = [(429, "1"), (503, ""), (503, ""), (429, "0")]
    monkeypatch.setattr(server, "_backoff", lambda state: 0.01)

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer xyzzy"
        seen.append(await request.json())
        times.append(asyncio.get_running_loop().time())
        if len(seen) <= len(later):
            status, after = later[len(seen) - 1]
            return web.Response(status=status, headers={"Retry-After": after} if after else {})
        if len(seen) == len(later) + 1:
            return web.json_response({"output": "1\n"})
        request.transport.close()
        return web.Response()

    async def then(section: SandboxSection) -> None:
        assert (await called("x", section)).startswith(f"tool_crash: error: {section.url}")

    served(then, handler)
    assert len(seen) == len(later) + 2
    assert times[1] - times[0] >= 1
    limits = {"wall_s": LIMITS.wall_s, "cpu_s": 5.0, "memory_bytes": 2**29, "file_bytes": 2**24, "open_files": 64, "output_bytes": 16384}
    assert seen[-1] == {"program": "x", "limits": limits}


def test_a_server_that_is_not_there_hangs_or_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_GRACE_S", 0.1)

    async def busy(request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "3600"}, text="come back tomorrow")

    async def hangs(request: web.Request) -> web.Response:
        await asyncio.sleep(2)
        return web.Response()

    for handler, told in ((busy, "status 429: come back tomorrow"), (hangs, "took longer than 0.3 s")):

        async def then(section: SandboxSection, told: str = told) -> None:
            assert told in await called("x", section, limited(wall_s=0.2))

        served(then, handler)
    nowhere = SandboxSection(url="http://127.0.0.1:1/run", token_env="SANDBOX_TOKEN")
    assert "Cannot connect to host 127.0.0.1:1" in asyncio.run(called("x", nowhere, limited(wall_s=0.2)))
    monkeypatch.delenv("SANDBOX_TOKEN")
    assert "no variable SANDBOX_TOKEN" in asyncio.run(called("x", nowhere))
