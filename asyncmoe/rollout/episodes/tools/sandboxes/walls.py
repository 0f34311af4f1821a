"""What is around a program on this machine: bubblewrap, or a container of docker or podman.

Both start `inside.py` with the limits of the standard library's `resource`, and hide this machine's files, processes and network.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits

DIRECTORY = "/sandbox"
"""The program's working directory, in memory."""
_INSIDE = Path(__file__).with_name("inside.py").read_text()
_SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_PROCESSES = 16
"""Processes and threads of a program: each has a memory of its own."""
_FIRST_VICTIM = "1000"
"""Of oom_score_adj (proc(5)): a machine or job without memory ends a program before it ends anything else."""
_USER = "65534"
"""nobody: the kernel does not limit the number of root's processes."""
_REST_BYTES = 64 * 2**20
"""Memory of a container's runtime, besides the program's and its files."""
_REMOVE_S = 20.0


class Wall(Protocol):
    """See the module."""

    name: str
    """What confines the program, for messages."""
    hint: str
    """What to do if it does not work."""
    environment: Mapping[str, str]
    start_s: float
    """Seconds in which a program must begin."""

    def command(self, name: str) -> list[str]:
        """Return the command that runs the program on its standard input; `name` is unique."""
        ...

    async def removed(self, name: str) -> None:
        """Remove what may be left after the command was killed."""
        ...


class Bubblewrap:
    """See `Wall`. The program sees /usr, the Python that runs it, a few devices, and its own directory.

    Raises:
        ConfigError: a program is missing.
    """

    name = "bubblewrap"
    hint = "allow unprivileged user namespaces, or set environment.sandbox.image (docker, podman) or environment.sandbox.url (a server)"
    environment: Mapping[str, str] = {}
    start_s = 30.0

    def __init__(self, limits: PythonLimits, section: SandboxSection) -> None:
        processes = {"RLIMIT_NPROC": (_PROCESSES, _PROCESSES)}
        self._limits, self._inside = limits, json.dumps(_rlimits(limits) | processes)
        python = shutil.which(section.python, path=_PATH)
        if python is None:
            hint = f"a path, such as environment.sandbox.python={os.path.realpath(sys.executable)}"
            raise ConfigError("environment.sandbox.python", got=section.python, expected=f"a Python in {_PATH}, or its path", hint=hint)
        self._python = os.path.realpath(python)
        as_nobody = [_found("setpriv", "util-linux"), f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"] if os.geteuid() == 0 else []
        self._outside = [*as_nobody, _found("choom", "util-linux"), "-n", _FIRST_VICTIM, "--", _found("bwrap", "bubblewrap")]

    def command(self, name: str) -> list[str]:
        """See `Wall`."""
        return [*self._outside, *self._around(), "--", self._python, "-I", "-S", "-c", _INSIDE, self._inside]

    def _around(self) -> Iterator[str]:
        yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv")
        yield from ("--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr")
        if not self._python.startswith("/usr/"):
            prefix = str(Path(self._python).parents[1])
            yield from ("--ro-bind", prefix, prefix)
        for path in _SYSTEM:
            if os.path.islink(path):
                yield from ("--symlink", os.readlink(path), path)
            elif os.path.isdir(path):
                yield from ("--ro-bind", path, path)
        yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
        # The file systems in memory that bwrap makes for itself have no limit.
        yield from ("--dev", "/dev", "--remount-ro", "/dev")
        yield from ("--perms", "0700", "--size", str(self._limits.file_bytes), "--tmpfs", DIRECTORY)
        yield from ("--remount-ro", "/", "--chdir", DIRECTORY)

    async def removed(self, name: str) -> None:
        """See `Wall`. The processes end with bwrap, and its file systems with them."""


class Container:
    """See `Wall`. Nothing of this machine is mounted, so the container may run on another one (DOCKER_HOST).

    Raises:
        ConfigError: there is no such runtime.
    """

    start_s = 60.0

    def __init__(self, limits: PythonLimits, section: SandboxSection) -> None:
        self._limits, self._section = limits, section
        self._runtime = _found(section.runtime, section.runtime)
        self.name = f"{section.runtime} with {section.image}"
        self.hint = f"start the runtime, and get the image: {section.runtime} pull {section.image}"
        # The command line finds its daemon, registry and credentials by variables; the container gets none of them.
        self.environment: Mapping[str, str] = dict(os.environ)

    def command(self, name: str) -> list[str]:
        """See `Wall`."""
        limits, section = self._limits, self._section
        assert section.image is not None
        memory = str(limits.memory_bytes + limits.file_bytes + _REST_BYTES)
        podman = section.runtime == "podman"  # refuses nr_inodes, and would make /tmp and others writable, in memory without a limit
        files = f"rw,nosuid,nodev,noexec,size={limits.file_bytes},mode=1777" + ("" if podman else ",nr_inodes=4096")
        confined = [
            *("--rm", "--interactive", "--name", name, "--pull", "never", "--log-driver", "none", "--network", "none", "--ipc", "none"),
            *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{_USER}:{_USER}"),
            *(
                "--pids-limit",
                str(_PROCESSES),
                "--cpus",
                "1",
                "--memory",
                memory,
                "--memory-swap",
                memory,
                "--oom-score-adj",
                _FIRST_VICTIM,
            ),
            *("--tmpfs", f"{DIRECTORY}:{files}", "--workdir", DIRECTORY, *(["--read-only-tmpfs=false"] if podman else [])),
        ]
        # Ends a container whose controller was killed; a program that were process 1 itself would not hear every signal.
        last_s = str(math.ceil(limits.wall_s + self.start_s))
        inside = ["-s", "KILL", last_s, section.python, "-I", "-S", "-c", _INSIDE, json.dumps(_rlimits(limits))]
        return [self._runtime, "run", *confined, "--entrypoint", "timeout", section.image, *inside]

    async def removed(self, name: str) -> None:
        """See `Wall`. The command line was killed, and its container is the daemon's."""
        nothing = asyncio.subprocess.DEVNULL
        command = (self._runtime, "rm", "--force", name)
        process = await asyncio.create_subprocess_exec(*command, stdin=nothing, stdout=nothing, stderr=nothing, env=dict(self.environment))
        try:
            async with asyncio.timeout(_REMOVE_S):
                await process.wait()
        except TimeoutError:  # the container ends by itself
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _rlimits(limits: PythonLimits) -> dict[str, tuple[int, int]]:
    """Return limits of each process (setrlimit(2))."""
    cpu_s = math.ceil(limits.cpu_s)
    most = {"AS": limits.memory_bytes, "FSIZE": limits.file_bytes, "NOFILE": limits.open_files, "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}
    return {"RLIMIT_CPU": (cpu_s, cpu_s + 1), **{f"RLIMIT_{name}": (value, value) for name, value in most.items()}}


def _found(program: str, package: str) -> str:
    path = shutil.which(program)
    if path is None:
        hint = f"install {package}, or set environment.sandbox.image (docker, podman) or environment.sandbox.url (a server)"
        raise ConfigError("environment.sandbox", got=f"no program {program}", expected="one that confines programs", hint=hint)
    return path
