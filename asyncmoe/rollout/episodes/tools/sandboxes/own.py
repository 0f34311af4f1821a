"""The default sandbox, built from Linux's own mechanisms, without a container runtime.

Each call runs a new `python -I -S` (standard library only) in an empty directory, started by `asyncmoe.rollout.episodes.tools.guard`. The
program's output is the observation.

Guaranteed always, on Linux on x86-64 and ARM64 (`asyncmoe.rollout.episodes.tools.seccomp`):
- the program may start threads, but it starts and signals no process; it is killed when its call ends, is cancelled or times out, and when
  the controller dies;
- it opens no socket, so it reaches neither the network nor a service of this machine;
- `PythonLimits` limit its wall-clock and CPU seconds, address space, file size, open files and output; output beyond the limit ends it;
- it inherits no variable, no open file and no capability.

Guaranteed with `namespaces` (user, mount, process, network and IPC; unprivileged on most kernels from 5.12 on, refused in many containers):
- every file system is read-only and without devices, except its own directory, which is in memory, limited in size, and removed afterwards;
- it sees no other process; /proc is empty.

Not guaranteed:
- protection against reading. It may read every file that the controller's user may read. Keep secrets out of that user's reach;
- with `namespaces: false`, protection against writing: it may change everything that the controller's user may change. Use this only on a
  machine that you can afford to lose;
- protection against kernel vulnerabilities. The sandbox contains a model that explores, not an attacker.

RLIMIT_NPROC is not used: it does not limit root, counts all of a user's processes on older kernels, and there are no processes to count.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping

from asyncmoe.errors import AsyncmoeError, ConfigError, WaitTimeout
from asyncmoe.rollout.episodes.tools import seccomp
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes.guarded import GUARD, settings

log = logging.getLogger(__name__)


class Own:
    """The guard alone, with namespaces of its own. See `Launcher`."""

    environment: Mapping[str, str] = {}
    more_s = 0.0

    def __init__(self, limits: PythonLimits) -> None:
        self._limits, self._filter = limits, seccomp.program().hex()
        if not limits.namespaces:
            log.warning("the python tool runs without namespaces: its code may write wherever this user can")

    def command(self, directory: str) -> list[str]:
        """See `Launcher`."""
        given = settings(self._limits, self._filter, sys.executable, directory)
        return [
            sys.executable,
            "-I",
            "-S",
            str(GUARD),
            json.dumps({**given, "parent": os.getpid(), "namespaces": self._limits.namespaces}),
        ]

    def place(self, directory: str) -> str:
        """See `Launcher`."""
        return directory

    async def removed(self, directory: str) -> None:
        """See `Launcher`. Nothing is left."""

    def late(self, seconds: float) -> AsyncmoeError:
        """See `Launcher`."""
        return WaitTimeout("the guard of the python tool", "end", seconds)

    def refused(self, got: str) -> ConfigError:
        """See `Launcher`."""
        hint = "allow unprivileged user namespaces (kernel 5.12+), or set namespaces=false where the code may write what this user may"
        expected = "a kernel that confines a program"
        return ConfigError("tools python", got=got, expected=expected, hint=hint if self._limits.namespaces else None)
