"""The other sandboxes: a container is asked for exactly what confines it, and a server answers within bounds."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncmoe.config import parse
from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import sandbox, server
from asyncmoe.rollout.episodes.tools.container import Container
from asyncmoe.rollout.episodes.tools.loading import python_tool
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.tool import ToolError
from examples.agents import sandbox_server
from tests.unit.test_tools_sandbox import LIMITS, limited
from tests.unit.test_tools_sandbox import pytestmark as BUBBLEWRAP

DOCKER = """#!{python}
import json, os, pathlib, signal, subprocess, sys
note = pathlib.Path({log!r})
with note.open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + chr(10))
if sys.argv[1] == "run":
    command = ["timeout", *sys.argv[sys.argv.index("--entrypoint") + 3:]]
    container = subprocess.Popen(command, cwd=note.with_name("inside"), stdout=subprocess.PIPE, start_new_session=True)
    note.with_name(sys.argv[sys.argv.index("--name") + 1]).write_text(str(container.pid))
    while some := os.read(container.stdout.fileno(), 65536):
        os.write(1, some)
    sys.exit(container.wait())
os.killpg(int(note.with_name(sys.argv[3]).read_text()), signal.SIGKILL)
"""
IMAGE = SandboxSection(image="python:3.12-slim")


async def called(code: str, section: SandboxSection, limits: PythonLimits = LIMITS) -> str:
    """What it printed, the reason and the detail why there is no result, or why there is no tool."""
    try:
        tool = await asyncio.to_thread(python_tool, limits, section)
        return str(await tool.call({"code": code}))
    except ToolError as error:
        return f"{error.reason}: {error.detail}"
    except ConfigError as error:
        return str(error)


@pytest.fixture(params=["docker", "podman"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for docker or podman: it notes its arguments, and runs the image's command here, without any wall around it."""
    (tmp_path / "inside").mkdir()
    (tmp_path / request.param).write_text(DOCKER.format(python=sys.executable, log=str(tmp_path / "log")))
    (tmp_path / request.param).chmod(0o755)
    for name in ("timeout", "python3"):
        (tmp_path / name).symlink_to(str(shutil.which(name, path="/usr/bin")))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / str(request.param)


def asked(runtime: Path) -> list[list[str]]:
    return [json.loads(line) for line in runtime.with_name("log").read_text().splitlines()]


def test_a_container_is_asked_for_exactly_this(runtime: Path) -> None:
    """Only the command is tested: whether a runtime keeps what it is asked for is the runtime's own matter."""
    assert asyncio.run(called("print(6 * 7)", IMAGE)) == "42\n"
    probed, run = asked(runtime)
    name = run[run.index("--name") + 1]
    assert name != probed[probed.index("--name") + 1]
    memory, podman = str((512 + 16 + 64) * 2**20), runtime.name == "podman"
    expected = [
        *("run", "--rm", "--interactive", "--name", name, "--pull", "never", "--log-driver", "none", "--network", "none", "--ipc", "none"),
        *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--cpus", "1", "--memory", memory),
        *("--memory-swap", memory, "--pids-limit", "16", "--oom-score-adj", "1000", "--user", "65534:65534", "--tmpfs"),
        "/sandbox:rw,nosuid,nodev,noexec,size=16777216,mode=1777" + ("" if podman else ",nr_inodes=4096"),
        *("--workdir", "/sandbox", *(["--read-only-tmpfs=false"] if podman else [])),
        *("--entrypoint", "timeout", "python:3.12-slim", "-s", "KILL", "120", "python3", "-I", "-S", "-c", sandbox.INSIDE),
    ]
    assert run[:-1] == expected
    assert json.loads(run[-1])["RLIMIT_CPU"] == [5, 6]
    assert "RLIMIT_NPROC" not in json.loads(run[-1]), "it would count the processes of all containers"


def test_a_container_whose_command_was_killed_is_removed(runtime: Path) -> None:
    code = "import os, time\nos.write(1, b'x' * 100)\ntime.sleep(60)"
    assert asyncio.run(called(code, IMAGE, limited(output_bytes=10))).startswith("tool_flood: xxxxxxxxxx\n")
    _, run, removed = asked(runtime)
    name = run[run.index("--name") + 1]
    assert removed == ["rm", "--force", name]
    assert not Path(f"/proc/{runtime.with_name(name).read_text()}/cwd").exists()


def test_a_container_that_cannot_start_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.write_text("#!/bin/sh\necho 'No such image: i' >&2\necho >&2\necho \"Run 'docker --help'\" >&2\nexit 125\n")
    with pytest.raises(ConfigError) as refused:
        python_tool(PythonLimits(), IMAGE)
    assert refused.value.what == "environment.sandbox"
    assert str(refused.value.got) == f"{runtime.name} with python:3.12-slim says: No such image: i"
    runtime.write_text("#!/bin/sh\n[ $1 = rm ] || exec /usr/bin/sleep 60\n")
    monkeypatch.setattr(Container, "start_s", 0.5)
    assert "started no program within 0.5 s" in asyncio.run(called("1", IMAGE))
    runtime.unlink()
    assert "environment.sandbox.url" in (refusal := asyncio.run(called("1", IMAGE)))
    assert refusal.startswith("environment.sandbox.image: got python:3.12-slim, and no program docker or podman")


def why_no_container() -> str | None:
    """The image comes from what is on the machine: nothing is pulled for a test."""
    try:
        python_tool(LIMITS, IMAGE)
    except ConfigError as error:
        return str(error)
    return None


CONTAINED = {
    "print(6 * 7)": "42\n",
    "open('/new', 'w')": "Read-only file system",
    "open('/tmp/new', 'w')": "Error",
    "open('new', 'w')\nimport os\nprint(os.getuid(), os.getppid(), sorted(os.listdir('.')))": "65534 1 ['main.py', 'new']",
    "import socket\nsocket.create_connection(('1.1.1.1', 53), 5)": "OSError",
    "import os\nn = 0\ntry:\n  while os.fork(): n += 1\nexcept OSError: print(n < 16)\nelse: os.pause()": "True",
    "while True: pass": "tool_timeout: error: the program took more than 1 s of CPU time",
    "while True: print('x')": "[cut at 16384 bytes]",
    "x = bytearray(10**10)": "MemoryError",
}


def test_a_real_container() -> None:
    if (reason := why_no_container()) is not None:
        pytest.skip(reason)
    for code, told in CONTAINED.items():
        assert told in asyncio.run(called(code, IMAGE, limited(cpu_s=1.0)))


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://me:secret@x"}, "url"),
        ({"url": "http://x", "image": "i"}, "url"),
        ({"token_env": "A"}, "token_env"),
    ],
)
def test_what_a_section_refuses(given: dict[str, str], key: str) -> None:
    with pytest.raises(ValueError, match=rf"environment\.sandbox\.{key}: got"):
        SandboxSection.model_validate(given)


def test_a_sandbox_without_the_tool_is_refused() -> None:
    given: dict[str, Any] = {"run": {"dir": "x", "steps": 1}, "model": {"path": "m"}, "task": {"kind": "arithmetic"}}
    tools = {"kind": "tools", "tools": {"names": ["python"]}, "sandbox": {"image": "i"}}
    assert parse(given | {"environment": tools}).environment.sandbox.image == "i"
    with pytest.raises(ConfigError, match=r"environment\.sandbox: got keys"):
        parse(given | {"environment": tools | {"tools": {"names": ["calculator"]}}})


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
        assert await called(killed, section, limits) == "tool_crash: error: the program was ended by signal 40"
        text = await called("import time\ntime.sleep(60)", section, limited(wall_s=0.5))
        assert text == "tool_timeout: error: the program took longer than 0.5 s"
        assert "status 400: limits above" in await called("1", section, limited(wall_s=3601.0))
        monkeypatch.setenv("SANDBOX_TOKEN", "wrong")
        assert f"environment.sandbox: got {section.url}: status 401: wrong token" in await called("1", section)

    served(then)


def ready(text: str = "1\n") -> web.Response:
    return web.json_response({"output": text})


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"hello", "not of the protocol"),
        (b'{"status": 0}', "not of the protocol"),
        (b'{"output": "", "timeout": "late"}', "not of the protocol"),
        (b'{"output": "", "status": -9999}', "not of the protocol"),
        (b"[" * 90000, "not of the protocol"),
        (b'{"output": "\xff"}', "not of the protocol"),
        (b'{"output": "' + b"x" * 200_000 + b'"}', "answered with more than"),
        (b'{"output": "' + b"x" * 20_000 + b'"}', "tool_flood"),
    ],
)
def test_what_a_server_may_answer(body: bytes, match: str) -> None:
    answers = [ready(), web.Response(body=body, content_type="application/json")]

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        return answers.pop(0)

    async def then(section: SandboxSection) -> None:
        text = await called("x", section)
        assert match in text
        assert text.startswith("tool_")
        assert len(text) < 20_000

    served(then, handler)


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
            return ready()
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def then(section: SandboxSection) -> None:
        assert (await called("x", section)).startswith(f"tool_crash: error: {section.url}")

    served(then, handler)
    assert len(seen) == len(later) + 2
    assert times[1] - times[0] >= 1
    limits = {"wall_s": LIMITS.wall_s, "cpu_s": 5.0, "memory_bytes": 2**29, "file_bytes": 2**24, "open_files": 64, "output_bytes": 16384}
    assert seen[-1] == {"program": "x", "limits": limits}


def test_a_server_that_is_not_there_hangs_or_redirects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_GRACE_S", 0.1)
    short = limited(wall_s=0.2)

    async def busy(request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "3600"}, text="come back tomorrow")

    async def hangs(request: web.Request) -> web.Response:
        await asyncio.sleep(2)
        return ready()

    async def redirects(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/")

    async def says(section: SandboxSection) -> None:
        told.append(await called("x", section, short))

    told: list[str] = []
    for handler in (busy, hangs, redirects):
        served(says, handler)
    assert "status 429: come back tomorrow" in told[0]
    assert "took longer than 0.3 s" in told[1]
    assert "status 307" in told[2]
    nowhere = SandboxSection(url="http://127.0.0.1:1/run", token_env="SANDBOX_TOKEN")
    assert "Cannot connect to host 127.0.0.1:1" in asyncio.run(called("x", nowhere, short))
    monkeypatch.delenv("SANDBOX_TOKEN")
    assert "no variable SANDBOX_TOKEN" in asyncio.run(called("x", nowhere))
