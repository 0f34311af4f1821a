"""A container gets exactly the confining options, and none is left over."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import sandbox
from asyncmoe.rollout.episodes.tools.container import Container
from asyncmoe.rollout.episodes.tools.loading import python_tool
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from tests.unit.test_tools_sandbox import LIMITS, limited
from tests.unit.test_tools_sandbox_server import called

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


@pytest.fixture(params=["docker", "podman"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for docker or podman: it notes its arguments, and runs the image's command here, without any confinement."""
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
    """Only the command is tested, not whether a runtime honours it."""
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
    assert refusal.startswith("environment.sandbox.image: got python:3.12-slim, but neither docker nor podman")


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
