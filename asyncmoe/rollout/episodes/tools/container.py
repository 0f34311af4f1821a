"""Programs of the tool "python" in containers of docker or podman, one each."""

from __future__ import annotations

import json
import math
import os
import shutil

from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import sandbox

_RUNTIMES = ("docker", "podman")
_REST_BYTES = 64 * sandbox.MIB
"""Memory of a container's runtime, in addition to the program's and its files'."""


class Container(sandbox.Sandbox):
    """Nothing of this machine is mounted, so the container may run on another one (DOCKER_HOST).

    Raises:
        ConfigError: there is no such runtime.
    """

    start_s = 60.0

    def __init__(self, limits: sandbox.PythonLimits, image: str) -> None:
        super().__init__(limits)
        self._runtime, self._image = next((name for name in _RUNTIMES if shutil.which(name)), ""), image
        if not self._runtime:
            got = f"{image}, but neither docker nor podman is installed"
            raise ConfigError("environment.sandbox.image", got=got, expected="one of these programs", hint=sandbox.WAYS)
        self.name = f"{self._runtime} with {image}"
        self.hint = f"start the runtime, and get the image: {self._runtime} pull {image}"
        # The command line finds its daemon, registry and credentials by variables; the container gets none of them.
        self.environment = dict(os.environ)

    def command(self, name: str) -> list[str]:
        """See `Sandbox`."""
        memory = str(self.limits.memory_bytes + self.limits.file_bytes + _REST_BYTES)
        podman = self._runtime == "podman"  # refuses nr_inodes, and would make /tmp and other paths writable, in memory without a limit
        files = f"rw,nosuid,nodev,noexec,size={self.limits.file_bytes},mode=1777" + ("" if podman else ",nr_inodes=4096")
        confined = [
            *("--rm", "--interactive", "--name", name, "--pull", "never", "--log-driver", "none", "--network", "none", "--ipc", "none"),
            *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--cpus", "1", "--memory", memory),
            *("--memory-swap", memory, "--pids-limit", str(sandbox.PROCESSES), "--oom-score-adj", sandbox.FIRST_VICTIM),
            *("--user", f"{sandbox.NOBODY}:{sandbox.NOBODY}", "--tmpfs", f"{sandbox.DIRECTORY}:{files}", "--workdir", sandbox.DIRECTORY),
            *(["--read-only-tmpfs=false"] if podman else []),
        ]
        # Ends a container whose rollout worker was killed; a program running as process 1 would ignore some signals.
        last_s = str(math.ceil(self.limits.wall_s + self.start_s))
        inside = ["-s", "KILL", last_s, "python3", "-I", "-S", "-c", sandbox.INSIDE, json.dumps(sandbox.rlimits(self.limits))]
        return [self._runtime, "run", *confined, "--entrypoint", "timeout", self._image, *inside]

    def removal(self, name: str) -> list[str]:
        """See `Sandbox`: the container belongs to the daemon. If it cannot be removed, it ends after its time limit."""
        return [self._runtime, "rm", "--force", name]
