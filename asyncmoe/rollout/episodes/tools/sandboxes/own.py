"""The default sandbox, built from Linux's own mechanisms, without a container runtime.

Each call runs a new `python -I -S` (standard library only) in an empty directory, started by `asyncmoe.rollout.episodes.tools.guard`. The
program's output is the observation.

Guaranteed always, on Linux on x86-64 and ARM64 (`asyncmoe.rollout.episodes.tools.seccomp`):
- the program may start threads, but it starts and signals no process; it is killed when its call ends, is cancelled or times out, and when
  the controller dies;
- it has no socket but connected pairs of its own, so it reaches neither the network nor a service of this machine;
- `PythonLimits` limit its wall-clock and CPU seconds, address space, file size, open files and output; output beyond the limit ends it;
- memory outside its address space, such as memfd's, System V's and POSIX's shared memory and message queues, is refused, so that
  `memory_bytes` and `file_bytes` together bound what it takes, but for the kernel's own records of threads, pipes and files;
- it inherits no variable, no open file and no capability.

Guaranteed with `namespaces` (user, mount, process, network, IPC, host name and cgroup; unprivileged on most kernels from 5.12 on, refused
in many containers):
- its root holds what `asyncmoe.rollout.episodes.tools.sandboxes.python_files` lists: Python, its standard library without installed
  packages, and their shared libraries, read-only; and its own directory, in memory, limited in size. It reads nothing else of this machine,
  neither files nor /proc, /dev, /sys;
- it sees no other process;
- a root's program runs as the user nobody, unless this root may not become nobody;
- it has at most `_THREADS` threads (Linux 5.14 on).

With `namespaces: false`, Landlock (Linux 5.13 on, where it is switched on) refuses the content of all other files, also to root, and
changes of files anywhere but in its own directory. There the program may still learn that a path exists, and a file's size, owner and
times, and list the names of installed packages; its files together have no limit, and its threads none but its memory. On a kernel without
Landlock it may read and write what the controller's user may: use this only on a machine that you can afford to lose. A warning says so.

Not guaranteed: protection against kernel vulnerabilities. The sandbox contains a model that explores, not an attacker.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import stat
from collections.abc import Mapping

from asyncmoe.errors import AsyncmoeError, ConfigError, WaitTimeout
from asyncmoe.rollout.episodes.tools import seccomp
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes.guarded import GUARD, settings
from asyncmoe.rollout.episodes.tools.sandboxes.kernel_support import counts_in_namespaces, landlock_version, refusing_switches
from asyncmoe.rollout.episodes.tools.sandboxes.python_files import python_files

log = logging.getLogger(__name__)

_INSIDE = "/work"
_THREADS = 256


class Own:
    """The guard alone, with a root of its own. See `Launcher`.

    Raises:
        ConfigError: a machine without a filter of system calls, or a Python that does not run.
    """

    environment: Mapping[str, str] = {}
    more_s = 0.0

    def __init__(self, limits: PythonLimits) -> None:
        self._limits, self._files = limits, python_files()
        self._landlock = not limits.namespaces and landlock_version() > 0
        self._filter = seccomp.program(attributes=not self._landlock).hex()
        if not limits.namespaces and not self._landlock:
            log.warning("the python tool runs without namespaces and without Landlock: its code may read and write whatever this user may")

    def command(self, directory: str) -> list[str]:
        """See `Launcher`."""
        place, files, limits = self.place(directory), self._files, self._limits
        given = settings(limits, self._filter, files.python, place)
        if limits.namespaces and counts_in_namespaces():
            given["rlimits"][resource.RLIMIT_NPROC] = (_THREADS, _THREADS)
        if limits.namespaces or self._landlock:
            given["root"] = {"bound": dict(files.bound), "hidden": files.hidden, "work": place, "disk_bytes": limits.file_bytes}
        guarded = {**given, "parent": os.getpid(), "landlock": self._landlock}
        return [files.python, "-I", "-S", str(GUARD), json.dumps(guarded)]

    def place(self, directory: str) -> str:
        """See `Launcher`."""
        return _INSIDE if self._limits.namespaces else directory

    async def removed(self, directory: str) -> None:
        """See `Launcher`. Nothing is left."""

    def late(self, seconds: float) -> AsyncmoeError:
        """See `Launcher`."""
        return WaitTimeout("the guard of the python tool", "end", seconds)

    def refused(self, got: str) -> ConfigError:
        """See `Launcher`."""
        private = [path for path in self._files.bound.values() if os.path.exists(path) and not os.stat(path).st_mode & stat.S_IROTH]
        if os.geteuid() == 0 and self._limits.namespaces and private:
            expected = "one that the user nobody may read, as whom a root's programs run"
            hint = f"chmod -R o+rX {private[0]}"
            return ConfigError("tools python", got=f"a Python with {private[0]}, which others may not read", expected=expected, hint=hint)
        if refusal := re.search(r"\[Errno \d+\] (.*): 'unshare'$", got):
            got = f"no user namespace ({refusal[1]})"
        switches = " ".join(refusing_switches())
        allow = f"as root: sysctl {switches}" if switches else "allow unprivileged user namespaces (kernel 5.12+)"
        if landlock_version():
            hint = f"{allow}, or set namespaces=false, where Landlock hides files"
        else:
            hint = f"{allow}, or choose another environment.sandbox.backend"
        return ConfigError(
            "tools python", got=got, expected="a kernel that confines a program", hint=hint if self._limits.namespaces else None
        )
