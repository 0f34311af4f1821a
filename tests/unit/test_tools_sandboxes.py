"""The other sandboxes: a container is asked for exactly what confines it, and a server answers within bounds."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from aiohttp import web

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes import python_tool, walls
from asyncmoe.rollout.episodes.tools.tool import ToolError
from examples.agents import sandbox_server
from tests.unit.sandboxed import LIMITS, SANDBOX, called, limited, run

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


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for docker: it notes its arguments, and runs the image's command here, without any wall around it."""
    log = tmp_path / "log"
    (tmp_path / "inside").mkdir()
    for name in ("docker", "podman"):
        (tmp_path / name).write_text(DOCKER.format(python=sys.executable, log=str(log)))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


def asked(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_a_container_is_asked_for_exactly_this(docker: Path, runtime: str) -> None:
    """Only the command is tested: whether a runtime keeps what it is asked for is the runtime's own matter."""
    section = SandboxSection.model_validate({"image": "python:3.12-slim", "runtime": runtime})
    assert run("print(6 * 7)", LIMITS, section) == "42\n"
    probed, called = asked(docker)
    name = called[called.index("--name") + 1]
    assert name.startswith("asyncmoe-")
    assert name != probed[probed.index("--name") + 1]
    memory = str(512 * 2**20 + 16 * 2**20 + 64 * 2**20)
    inodes = "" if runtime == "podman" else ",nr_inodes=4096"
    expected = [
        *("run", "--rm", "--interactive", "--name", name, "--pull", "never", "--log-driver", "none", "--network", "none", "--ipc", "none"),
        *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534", "--pids-limit", "16"),
        *("--cpus", "1", "--memory", memory, "--memory-swap", memory, "--oom-score-adj", "1000"),
        *("--tmpfs", f"/sandbox:rw,nosuid,nodev,noexec,size=16777216,mode=1777{inodes}", "--workdir", "/sandbox"),
        *(["--read-only-tmpfs=false"] if runtime == "podman" else []),
        *("--entrypoint", "timeout", "python:3.12-slim", "-s", "KILL", "120", "python3", "-I", "-S", "-c", walls._INSIDE),
    ]
    assert called[:-1] == expected
    assert json.loads(called[-1])["RLIMIT_CPU"] == [5, 6]


def test_a_container_whose_command_was_killed_is_removed(docker: Path) -> None:
    section = SandboxSection(image="i")
    code = "import os\nos.write(1, b'x' * 100)\nimport time\ntime.sleep(60)"
    assert run(code, limited(output_bytes=10), section).startswith("tool_flood: xxxxxxxxxx\n")
    _, called, removed = asked(docker)
    name = called[called.index("--name") + 1]
    assert removed == ["rm", "--force", name]
    assert not Path(f"/proc/{docker.with_name(name).read_text()}/cwd").exists()


def test_a_container_whose_daemon_hangs_costs_its_call(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def call() -> None:
        python = python_tool(LIMITS, SandboxSection(image="i"))
        docker.with_name("docker").write_text("#!/bin/sh\n[ $1 = rm ] || exec sleep 60\n")
        monkeypatch.setattr(walls.Container, "start_s", 0.5)
        with pytest.raises(ToolError, match=r"tool_crash: error: the sandbox failed: docker with i started no program within 0\.5 s"):
            await python.call("1")
        await python.close()

    asyncio.run(call())


REAL = os.environ.get("ASYNCMOE_TEST_CONTAINER", "")
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


@pytest.mark.skipif(not REAL, reason="no container runtime: ASYNCMOE_TEST_CONTAINER='podman python:3.12-slim' names one and an image")
@pytest.mark.parametrize("code", CONTAINED)
def test_a_real_container(code: str) -> None:
    runtime, image = REAL.split()
    section = SandboxSection.model_validate({"image": image, "runtime": runtime})
    assert CONTAINED[code] in run(code, limited(cpu_s=1.0), section)


def test_a_container_that_cannot_start_is_refused(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = SandboxSection(image="i")
    docker.with_name("docker").write_text(
        "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\necho \"Run 'docker --help'\" >&2\nexit 125\n"
    )
    with pytest.raises(ConfigError, match=r"docker with i says: Cannot connect to the Docker daemon, expected.*docker pull i"):
        python_tool(LIMITS, section)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"environment\.sandbox: got no program docker"):
        python_tool(LIMITS, section)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"image": ""}, "image: got '', expected an image"),
        ({"image": "--privileged"}, "image: got '--privileged'"),
        ({"image": "i", "python": "-c"}, "python: got '-c'"),
        ({"url": "ftp://x"}, "url: got 'ftp://x', expected http"),
        ({"url": "http://me:secret@x"}, "expected none; use token_env"),
        ({"url": "http://x", "token_env": "A B"}, "token_env: got 'A B'"),
        ({"token_env": "A"}, "token_env: got 'A', expected with url"),
        ({"url": "http://x", "image": "i"}, "url: got a server, and an image, expected one of them"),
        ({"runtime": "gvisor"}, "'docker' or 'podman'"),
    ],
)
def test_what_a_section_refuses(given: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SandboxSection.model_validate(given)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def served(then: Callable[[str], Awaitable[None]], handler: Handler | None = None) -> None:
    """Serve a handler, or the example's server, while `then` runs with its URL."""

    async def both() -> None:
        application = sandbox_server.application("xyzzy")
        if handler is not None:
            application = web.Application()
            application.router.add_post("/run", handler)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with asyncio.timeout(60):
                await then(f"http://127.0.0.1:{runner.addresses[0][1]}/run")
        finally:
            await runner.cleanup()

    asyncio.run(both())


async def remote(url: str, code: str, limits: PythonLimits = LIMITS) -> str:
    try:
        return await called(code, limits, SandboxSection(url=url, token_env="SANDBOX_TOKEN"))
    except ConfigError as error:
        return str(error)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TOKEN", "xyzzy")


@SANDBOX
def test_a_server_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's server, with bubblewrap behind it."""

    async def then(url: str) -> None:
        assert await remote(url, "print('é\\x00')") == "é\x00\n"
        assert (await remote(url, "1/0")).rstrip().endswith("ZeroDivisionError: division by zero")
        assert await remote(url, "while True: print('x')", limited(output_bytes=4)) == "tool_flood: x\nx\n\n[cut at 4 bytes]"
        text = await remote(url, "import time\ntime.sleep(60)", limited(wall_s=0.5))
        assert text == "tool_timeout: error: the program took longer than 0.5 s"
        assert "status 400: limits above" in await remote(url, "1", limited(wall_s=3601.0))
        monkeypatch.setenv("SANDBOX_TOKEN", "wrong")
        refused = await remote(url, "1")
        assert refused == f"environment.sandbox: got {url}: status 401: wrong token, expected a sandbox that runs a program"

    served(then)


def ready(text: str = "ready\n") -> web.Response:
    return web.json_response({"output": text})


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"hello", "not of the protocol"),
        (b'{"status": 0}', "not of the protocol"),
        (b'{"output": "", "status": "0"}', "not of the protocol"),
        (b'{"output": "", "timeout": "late"}', "not of the protocol"),
        (b"[" * 90000, "not of the protocol"),
        (b'{"output": "\xff"}', "not of the protocol"),
        (b'{"output": "' + b"x" * 200_000 + b'"}', "answered with more than"),
        (b'{"output": "' + b"x" * 20_000 + b'"}', "tool_flood"),
        (b'{"output": "", "status": -9999}', "ended by signal 9999"),
    ],
)
def test_what_a_server_may_answer(body: bytes, match: str) -> None:
    answers = [ready(), web.Response(body=body, content_type="application/json")]

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        return answers.pop(0)

    async def then(url: str) -> None:
        text = await remote(url, "x")
        assert match in text
        assert text.startswith("tool_")
        assert len(text) < 20_000

    served(then, handler)


def test_a_program_is_posted_again_only_if_none_has_begun() -> None:
    """Also beyond three times, and not before the server says so."""
    seen: list[dict[str, object]] = []
    times: list[float] = []
    later = [(429, "2"), (503, format_datetime(datetime.now(UTC) + timedelta(seconds=4))), (503, ""), (429, "0")]

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

    async def then(url: str) -> None:
        assert "tool_crash: error: the sandbox" in await remote(url, "x")

    served(then, handler)
    assert len(seen) == len(later) + 2
    assert times[1] - times[0] >= 2
    limits = {"wall_s": LIMITS.wall_s, "cpu_s": 5.0, "memory_bytes": 2**29, "file_bytes": 2**24, "open_files": 64, "output_bytes": 16384}
    assert seen[-1] == {"program": "x", "limits": limits}


def test_a_server_that_is_not_there_hangs_or_redirects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncmoe.rollout.episodes.tools.sandboxes.remote._GRACE_S", 0.1)
    short = limited(wall_s=0.2)
    assert "Cannot connect to host 127.0.0.1:1" in asyncio.run(remote("http://127.0.0.1:1/run", "x", short))

    async def busy(request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "3600"}, text="come back tomorrow")

    async def hangs(request: web.Request) -> web.Response:
        await asyncio.sleep(2)
        return ready()

    async def redirects(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/")

    async def says(url: str) -> None:
        told.append(await remote(url, "x", short))

    told: list[str] = []
    for handler in (busy, hangs, redirects):
        served(says, handler)
    assert "status 429: come back tomorrow" in told[0]
    assert "took longer than 0.3 s" in told[1]
    assert "status 307" in told[2]
    monkeypatch.delenv("SANDBOX_TOKEN")
    assert "SANDBOX_TOKEN, which is not set" in asyncio.run(remote("http://127.0.0.1:1/run", "x"))
