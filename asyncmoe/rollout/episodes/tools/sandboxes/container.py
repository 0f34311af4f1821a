"""The sandbox `container`: the guard as the first process of a container that docker or podman starts for each program.

The guard comes as an argument and the program on standard input, so nothing of this machine is mounted, and the container may run on
another machine (DOCKER_HOST). The guard's limits and filter hold inside as they do outside; the runtime's are a second wall.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import AsyncmoeError, ConfigError
from asyncmoe.rollout.episodes.tools import seccomp
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes.guarded import GUARD, settings
from asyncmoe.rollout.episodes.tools.tool import CRASH, ToolError

KEY = "environment.sandbox.backend"
_INSIDE = "/asyncmoe"
"""No image has it; otherwise the directory in memory would get the mode of the image's."""
_USER = "65534:65534"
_PIDS = 256
"""Processes and threads; a second wall behind the filter, under which there is one process."""
_GUARD_BYTES = 64 * 2**20
"""Memory of the guard and the runtime, beside the program's and its files."""
_REMOVE_S = 20.0


class ContainerSandbox:
    """See `Launcher`.

    Raises:
        ConfigError: there is no such runtime.
    """

    more_s = 60.0

    def __init__(self, limits: PythonLimits, section: SandboxSection) -> None:
        self._limits, self._section, self._filter = limits, section, seccomp.program().hex()
        # The command line finds its daemon, registry and credentials by variables; the container gets none of them.
        self.environment: Mapping[str, str] = dict(os.environ)
        self._guard = GUARD.read_text()
        program = shutil.which(section.runtime)
        if program is None:
            raise ConfigError(
                "environment.sandbox.runtime", got=f"{section.runtime}, but no such program", expected="docker or podman, installed"
            )
        self._runtime = program

    def command(self, directory: str) -> list[str]:
        """See `Launcher`."""
        limits, section = self._limits, self._section
        assert section.image is not None
        given = settings(limits, self._filter, section.python, _INSIDE)
        given["program"] = ["/usr/bin/env", *given["program"]] if "/" not in section.python else given["program"]
        given["environment"]["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        memory = str(limits.memory_bytes + limits.file_bytes + _GUARD_BYTES)
        # podman refuses nr_inodes, and would make /tmp and others writable, in memory without a limit.
        podman = section.runtime == "podman"
        files = f"rw,nosuid,nodev,noexec,size={limits.file_bytes},mode=1777" + ("" if podman else ",nr_inodes=4096")
        confined = [
            *("--rm", "--interactive", "--name", _name(directory), "--pull", "never", "--log-driver", "none"),
            *("--network", "none", "--ipc", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--user", _USER, "--pids-limit", str(_PIDS), "--cpus", "1", "--memory", memory, "--memory-swap", memory),
            *("--tmpfs", f"{_INSIDE}:{files}", "--workdir", _INSIDE),
            *(["--read-only-tmpfs=false"] if podman else []),
        ]
        guard = ["-I", "-S", "-c", self._guard, json.dumps(given)]
        return [self._runtime, "run", *confined, "--entrypoint", section.python, section.image, *guard]

    def place(self, directory: str) -> str:
        """See `Launcher`."""
        return _INSIDE

    async def removed(self, directory: str) -> None:
        """See `Launcher`. The command line was killed, and its container is the daemon's."""
        nothing = asyncio.subprocess.DEVNULL
        command = (self._runtime, "rm", "--force", _name(directory))
        process = await asyncio.create_subprocess_exec(*command, stdin=nothing, stdout=nothing, stderr=nothing, env=dict(self.environment))
        try:
            async with asyncio.timeout(_REMOVE_S):
                await process.wait()
        except TimeoutError:
            # The guard inside ends the container after its own wall-clock limit.
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def late(self, seconds: float) -> AsyncmoeError:
        """See `Launcher`. The daemon is not ours."""
        return ToolError(CRASH, f"error: the sandbox failed: {self._section.runtime} did not answer within {seconds:g} s")

    def refused(self, got: str) -> ConfigError:
        """See `Launcher`."""
        named = f"{self._section.runtime} with {self._section.image}, which says: {got}"
        hint = f"start the runtime, and get the image: {self._section.runtime} pull {self._section.image}"
        return ConfigError(KEY, got=named, expected="a container that runs a Python program", hint=hint)


def _name(directory: str) -> str:
    """Return the container's name, as unique on this machine as the directory; host and process make it so on a shared daemon."""
    return f"asyncmoe-{os.uname().nodename}-{os.getpid()}-{PurePath(directory).name}"
