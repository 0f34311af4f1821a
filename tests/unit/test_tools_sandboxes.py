"""The other sandboxes: bubblewrap hides files, a container is asked for exactly what confines it, and a server answers within bounds."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import loading, seccomp
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes import container, guarded, own, python_tool
from asyncmoe.rollout.episodes.tools.sandboxes.bubblewrap import Bubblewrap
from asyncmoe.rollout.episodes.tools.sandboxes.guarded import settings
from asyncmoe.rollout.episodes.tools.tool import ToolError
from examples.agents import sandbox_server

LIMITS = PythonLimits(wall_s=20 + os.getpid() / 2**30)


def why_not(make: Callable[[], object]) -> str | None:
    if not sys.platform.startswith("linux"):
        return "not Linux"
    try:
        make()
    except ConfigError as error:
        return str(error)
    return None


NO_BWRAP = why_not(lambda: python_tool(LIMITS, SandboxSection(backend="bubblewrap")))
NO_OWN = why_not(lambda: python_tool(LIMITS))
BWRAP = pytest.mark.skipif(NO_BWRAP is not None, reason=str(NO_BWRAP))
OWN = pytest.mark.skipif(NO_OWN is not None, reason=str(NO_OWN))


def run(code: str, section: SandboxSection, limits: PythonLimits = LIMITS) -> str:
    """What it printed, or the reason and the detail why there is no result."""

    async def call() -> str:
        python = python_tool(limits, section)
        try:
            return await python.call(code)
        except ToolError as error:
            return f"{error.reason}: {error.detail}"
        finally:
            await python.close()

    return asyncio.run(call())


def bubble(code: str, **limits: float) -> str:
    return run(code, SandboxSection(backend="bubblewrap"), replace(LIMITS, **limits))  # type: ignore[arg-type]


def inside() -> list[str]:
    """Command lines of our guards and their walls; `LIMITS.wall_s` is in them, and no other process has it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(LIMITS.wall_s).encode() in command:
                found.append(command.decode(errors="replace"))
    return found


def gone() -> bool:
    until = time.monotonic() + 10
    while inside() and time.monotonic() < until:
        time.sleep(0.02)
    return not inside()


@BWRAP
def test_bubblewrap_hides_files_and_allows_no_others(tmp_path: Path) -> None:
    secret = tmp_path / "rendezvous.json"
    secret.write_text("key")
    here = Path(own.__file__)
    hidden = [*(f"open({str(path)!r}).read()" for path in (secret, here, Path("/etc/passwd"), Path("/proc/1/environ")))]
    hidden += ["open('/guard.py', 'w')", "open('/new', 'w')", "open('/usr/new', 'w')", "open('/dev/new', 'w')", "open('/dev/shm/new', 'w')"]
    hidden += [f"import os; os.listdir({str(Path.home() / '.ssh')!r})", "import os; os.listdir('/proc')", "import os; os.mkdir('/tmp')"]
    code = "refused = 0\n" + "\n".join(f"try: {one}\nexcept OSError: refused += 1\nelse: print({one!r})" for one in hidden)
    assert bubble(f"{code}\nprint(refused)") == f"{len(hidden)}\n"
    text = bubble("import os\nprint(sorted(os.environ), os.listdir('.'), os.getcwd(), os.getuid())")
    assert text == "['HOME', 'LANG', 'TMPDIR'] ['main.py'] /work 1000\n"


@BWRAP
def test_bubblewrap_keeps_the_limits() -> None:
    assert bubble("print('é')\n1/0").startswith('tool_error: é\nTraceback (most recent call last):\n  File "main.py", line 2, in <module>')
    assert bubble("while True: pass", cpu_s=1.0) == "tool_timeout: error: the program took more than 1 s of CPU time"
    assert bubble("import time\ntime.sleep(60)", wall_s=0.5) == "tool_timeout: error: the program took longer than 0.5 s"
    assert "MemoryError" in bubble("x = bytearray(10**10)")
    assert bubble("while True: print('x')", output_bytes=4) == "tool_flood: x\nx\n\n[cut at 4 bytes]"
    assert "No space left" in bubble("for i in range(9): open(str(i), 'wb').write(bytes(2**19))", file_bytes=2**20)
    assert bubble("import ctypes\nctypes.string_at(0)") == "tool_crash: error: the program was ended by SIGSEGV"
    assert gone()


ATTACKS = {
    "fork": "import os\nos.fork()",
    "shell": "import subprocess\nsubprocess.run(['true'])",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', 1))",
    "unshare": "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nif c.unshare(0x10000000): raise PermissionError(ctypes.get_errno())",
    "kill": "import os\nos.kill(1, 9)",
    "stop": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
}


@BWRAP
@pytest.mark.parametrize("attack", ATTACKS)
def test_bubblewrap_refuses(attack: str) -> None:
    text = bubble(ATTACKS[attack])
    assert text.startswith("tool_error")
    assert "PermissionError" in text
    assert gone()


@BWRAP
def test_a_cancelled_call_in_bubblewrap_leaves_nothing() -> None:
    async def call() -> None:
        python = python_tool(LIMITS, SandboxSection(backend="bubblewrap"))
        calling = asyncio.create_task(python.call("import time\ntime.sleep(60)"))
        while len(inside()) < 3:  # bwrap, the first process of its namespace, and the guard
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await python.close()

    asyncio.run(call())
    assert gone()


def test_without_bwrap_nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"bubblewrap, but no program bwrap.*apt install"):
        loading.load(["python"], sandbox=SandboxSection(backend="bubblewrap"))
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="which says: bwrap: No permissions to create new namespace, expected"):
        loading.load(["python"], sandbox=SandboxSection(backend="bubblewrap"))


DOCKER = """#!{python}
import json, os, sys
with open({log!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + chr(10))
if sys.argv[1] == "run":
    where = sys.argv.index("--entrypoint")
    os.execvp({python!r}, [{python!r}, *sys.argv[where + 3:]])
"""


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for docker: it notes its arguments, and runs the image's Python with the rest here, without any wall around it."""
    log = tmp_path / "log"
    for name in ("docker", "podman"):
        (tmp_path / name).write_text(DOCKER.format(python=sys.executable, log=str(log)))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


def asked(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@OWN
@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_a_container_is_asked_for_exactly_this(docker: Path, runtime: str) -> None:
    """Only the command is tested: whether a runtime keeps what it is asked for is the runtime's own matter."""
    section = SandboxSection.model_validate({"backend": "container", "image": "python:3.12-slim", "runtime": runtime})
    assert run("print(6 * 7)", section, replace(LIMITS, wall_s=60.0)) == "42\n"
    probed, called = asked(docker)
    name = called[called.index("--name") + 1]
    assert name.startswith(f"asyncmoe-{os.uname().nodename}-{os.getpid()}-tool-")
    assert name != probed[probed.index("--name") + 1]
    memory = str(512 * 2**20 + 16 * 2**20 + 64 * 2**20)
    inodes = "" if runtime == "podman" else ",nr_inodes=4096"
    expected = [
        *("run", "--rm", "--interactive", "--name", name, "--pull", "never", "--log-driver", "none", "--network", "none", "--ipc", "none"),
        *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534", "--pids-limit", "256"),
        *("--cpus", "1", "--memory", memory, "--memory-swap", memory),
        *("--tmpfs", f"/asyncmoe:rw,nosuid,nodev,noexec,size=16777216,mode=1777{inodes}", "--workdir", "/asyncmoe"),
        *(["--read-only-tmpfs=false"] if runtime == "podman" else []),
        *("--entrypoint", "python3", "python:3.12-slim", "-I", "-S", "-c", guarded.GUARD.read_text()),
    ]
    assert called[:-1] == expected
    settings = json.loads(called[-1])
    assert settings["parent"] is None
    assert settings["root"] is None
    assert settings["landlock"] is False
    assert settings["program"] == ["/usr/bin/env", "python3", "-I", "-S", "-u", "-X", "utf8", "main.py"]
    assert settings["rlimits"]["0"] == [5, 6]


@OWN
def test_a_container_whose_command_was_killed_is_removed(docker: Path) -> None:
    section = SandboxSection(backend="container", image="i")
    code = "import os\nos.write(1, b'x' * 100)\nimport time\ntime.sleep(60)"
    assert run(code, section, replace(LIMITS, output_bytes=10)).startswith("tool_flood: xxxxxxxxxx\n")
    _, called, removed = asked(docker)
    assert removed == ["rm", "--force", called[called.index("--name") + 1]]
    assert gone()


@OWN
def test_a_container_whose_daemon_hangs_costs_its_call(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "_GRACE_S", 1.0)
    monkeypatch.setattr(container.ContainerSandbox, "more_s", 0.5)
    section = SandboxSection(backend="container", image="i")

    async def call() -> None:
        python = python_tool(replace(LIMITS, wall_s=0.5), section)
        docker.with_name("docker").write_text("#!/bin/sh\n[ $1 = rm ] || exec sleep 60\n")
        with pytest.raises(ToolError, match="tool_crash: error: the sandbox failed: docker did not answer within 2 s"):
            await python.call("1")
        await python.close()

    asyncio.run(call())


REAL = os.environ.get("ASYNCMOE_TEST_CONTAINER", "")
CONTAINED = {
    "print(6 * 7)": "42\n",
    "open('/new', 'w')": "Read-only file system",
    "open('/tmp/new', 'w')": "Error",
    "open('new', 'w')\nimport os\nprint(os.getuid(), os.getppid(), sorted(os.listdir('.')))": "65534 1 ['main.py', 'new']",
    "import socket\nsocket.socket()": "PermissionError",
    "import os\nos.fork()": "PermissionError",
    "open('/proc/1/mem', 'r+b')": "PermissionError",
    "while True: pass": "tool_timeout: error: the program took more than 1 s of CPU time",
    "while True: print('x')": "[cut at 16384 bytes]",
    "x = bytearray(10**10)": "MemoryError",
}


@pytest.mark.skipif(not REAL, reason="no container runtime: ASYNCMOE_TEST_CONTAINER='podman python:3.12-slim' names one and an image")
@pytest.mark.parametrize("code", CONTAINED)
def test_a_real_container(code: str) -> None:
    runtime, image = REAL.split()
    section = SandboxSection.model_validate({"backend": "container", "image": image, "runtime": runtime})
    assert CONTAINED[code] in run(code, section, replace(LIMITS, cpu_s=1.0))


def test_a_container_that_cannot_start_is_refused(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = SandboxSection(backend="container", image="i")
    docker.with_name("docker").write_text(
        "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\necho \"Run 'docker --help'\" >&2\nexit 125\n"
    )
    with pytest.raises(ConfigError, match=r"docker with i, which says: Cannot connect to the Docker daemon, expected.*docker pull i"):
        python_tool(LIMITS, section)
    monkeypatch.setattr(container.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"environment\.sandbox\.runtime: got docker, but no such program"):
        python_tool(LIMITS, section)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"backend": "container"}, "image: got None, expected an image"),
        ({"backend": "container", "image": "--privileged"}, "image: got '--privileged'"),
        ({"backend": "container", "image": "i", "python": "-c"}, "python: got '-c'"),
        ({"backend": "bubblewrap", "image": "i"}, "image: got i, expected null"),
        ({"backend": "http"}, "url: got None, expected http"),
        ({"backend": "http", "url": "ftp://x"}, "url: got 'ftp://x', expected http"),
        ({"backend": "http", "url": "http://me:secret@x"}, "expected none; use token_env"),
        ({"backend": "http", "url": "http://x", "token_env": "A B"}, "token_env: got 'A B'"),
        ({"url": "http://x"}, "url: got http://x, expected null"),
        ({"backend": "gvisor"}, "'asyncmoe', 'bubblewrap', 'container' or 'http'"),
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


async def remote(url: str, code: str, limits: PythonLimits = LIMITS, retries: int = 2) -> str:
    section = SandboxSection(backend="http", url=url, token_env="SANDBOX_TOKEN", retries=retries)
    try:
        python = await asyncio.to_thread(python_tool, limits, section)
        try:
            return await python.call(code)
        finally:
            await python.close()
    except ToolError as error:
        return f"{error.reason}: {error.detail}"
    except ConfigError as error:
        return str(error)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SANDBOX_TOKEN", "xyzzy")
    return


@OWN
def test_a_server_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's server, with asyncmoe's own sandbox behind it."""

    async def then(url: str) -> None:
        assert await remote(url, "print('é\\x00')") == "é\x00\n"
        assert (await remote(url, "1/0")).rstrip().endswith("ZeroDivisionError: division by zero")
        assert await remote(url, "while True: print('x')", replace(LIMITS, output_bytes=4)) == "tool_flood: x\nx\n\n[cut at 4 bytes]"
        text = await remote(url, "import time\ntime.sleep(60)", replace(LIMITS, wall_s=0.5))
        assert text == "tool_timeout: error: the program took longer than 0.5 s"
        assert "status 400: limits above" in await remote(url, "1", replace(LIMITS, wall_s=3600.0))
        monkeypatch.setenv("SANDBOX_TOKEN", "wrong")
        refused = await remote(url, "1")
        assert refused == f"environment.sandbox.url: got {url}: status 401: wrong token, expected a server that runs a program"

    served(then)


def ready(text: str = "ready\n") -> web.Response:
    return web.json_response({"output": text})


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"hello", "not of the protocol"),
        (b'{"status": 0}', "not of the protocol"),
        (b'{"output": "", "status": "0"}', "not of the protocol"),
        (b'{"output": "", "timeout": "late"}', "got timeout 'late'"),
        (b"[" * 90000, "not of the protocol"),
        (b'{"output": "\xff"}', "not of the protocol"),
        (b'{"output": "' + b"x" * 200_000 + b'"}', "an answer of more than"),
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


def test_a_program_is_posted_again_only_if_none_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncmoe.rollout.episodes.tools.sandboxes.remote._PAUSE_S", 0.01)
    seen: list[dict[str, object]] = []
    broken: list[int] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer xyzzy"
        seen.append(await request.json())
        if len(seen) <= 2:
            return web.Response(status=429 if len(seen) == 1 else 503, headers={"Retry-After": "0"})
        if len(seen) == 3:
            return ready()
        assert request.transport is not None
        broken.append(1)
        request.transport.close()
        return web.Response()

    async def then(url: str) -> None:
        assert "tool_crash: error: the sandbox" in await remote(url, "x")

    served(then, handler)
    assert len(seen) == 4
    assert len(broken) == 1
    limits = {"wall_s": LIMITS.wall_s, "cpu_s": 5.0, "memory_bytes": 2**29, "file_bytes": 2**24, "open_files": 64, "output_bytes": 16384}
    assert seen[-1] == {"program": "x", "limits": limits}


def test_a_server_that_is_not_there_hangs_or_redirects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncmoe.rollout.episodes.tools.sandboxes.remote._PAUSE_S", 0.01)
    monkeypatch.setattr("asyncmoe.rollout.episodes.tools.sandboxes.remote._GRACE_S", 0.1)
    assert "Cannot connect to host 127.0.0.1:1" in asyncio.run(remote("http://127.0.0.1:1/run", "x"))

    async def hangs(request: web.Request) -> web.Response:
        await asyncio.sleep(2)
        return ready()

    async def redirects(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/")

    async def late(url: str) -> None:
        assert "no answer within 0.3 s" in await remote(url, "x", replace(LIMITS, wall_s=0.2))

    async def elsewhere(url: str) -> None:
        assert "status 307" in await remote(url, "x")

    served(late, hangs)
    served(elsewhere, redirects)
    monkeypatch.delenv("SANDBOX_TOKEN")
    assert "SANDBOX_TOKEN, which is not set" in asyncio.run(remote("http://127.0.0.1:1/run", "x"))


@OWN
def test_the_guard_cannot_be_written_to_through_proc() -> None:
    """A container's /proc is there, and the guard has the program's user. Root's guard has capabilities, which protect it anyhow."""
    root = os.geteuid() == 0
    python = "/usr/bin/python3" if root else sys.executable
    if not Path(python).exists():
        pytest.skip("no Python that another user can execute")
    given = settings(LIMITS, seccomp.program().hex(), python, "/tmp")
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        done = subprocess.run(
            [python, "-I", "-S", "-c", guarded.GUARD.read_text(), json.dumps(given)],
            input=b"import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')",
            capture_output=True,
            cwd=directory,
            user=65534 if root else None,
            timeout=60,
            check=False,
        )
    assert b"PermissionError" in done.stdout


@BWRAP
def test_bubblewrap_binds_what_python_needs_and_no_more() -> None:
    command = Bubblewrap(LIMITS).command("/nowhere")
    bound = [command[i + 1] for i, word in enumerate(command) if word.startswith("--ro-bind")]
    allowed = ("/usr", "/lib", "/bin", "/sbin", "/etc/ld.so.cache", os.path.realpath(sys.base_prefix), str(guarded.GUARD))
    assert all(path.startswith(allowed) for path in bound)
