"""The sandbox `bubblewrap`: the guard inside `bwrap`, which hides every file but Python's and the system's libraries.

What `asyncmoe.rollout.episodes.tools.sandboxes.own` guarantees holds here too, and the program reads no file of the user, of other users,
or of /etc: there are only /usr, Python's own directory, a few devices, and the program's directory in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncmoe.errors import AsyncmoeError, ConfigError, WaitTimeout
from asyncmoe.rollout.episodes.tools import seccomp
from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes.guarded import GUARD, settings

KEY = "environment.sandbox.backend"
_SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
_INSIDE, _GUARD_INSIDE = "/work", "/guard.py"
_USER = "1000"


class Bubblewrap:
    """See `Launcher`.

    Raises:
        ConfigError: there is no bwrap.
    """

    environment: Mapping[str, str] = {}
    more_s = 0.0

    def __init__(self, limits: PythonLimits) -> None:
        self._limits, self._filter = limits, seccomp.program().hex()
        program = shutil.which("bwrap")
        if program is None:
            raise ConfigError(KEY, got="bubblewrap, but no program bwrap", expected="bwrap to be installed", hint="apt install bubblewrap")
        self._bwrap = program
        # A virtual environment's Python is a link to the one that has the standard library beside it.
        self._python = os.path.realpath(sys.executable)

    def command(self, directory: str) -> list[str]:
        """See `Launcher`."""
        given = settings(self._limits, self._filter, self._python, _INSIDE)
        guard = [self._python, "-I", "-S", _GUARD_INSIDE, json.dumps(given)]
        return [self._bwrap, *self._around(), "--", *guard]

    def _around(self) -> Iterator[str]:
        # "try": kernels without the cgroup namespace.
        yield from ("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
        yield from ("--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", "--uid", _USER, "--gid", _USER)
        for path in _read_only(self._python):
            yield from ("--ro-bind", path, path)
        for path in _SYSTEM:
            if os.path.islink(path):
                yield from ("--symlink", os.readlink(path), path)
            elif os.path.isdir(path):
                yield from ("--ro-bind", path, path)
        yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
        yield from ("--ro-bind", str(GUARD), _GUARD_INSIDE)
        # Both file systems that bwrap makes in memory for itself would have no limit.
        yield from ("--dev", "/dev", "--remount-ro", "/dev")
        yield from ("--perms", "0700", "--size", str(self._limits.file_bytes), "--tmpfs", _INSIDE)
        yield from ("--remount-ro", "/", "--chdir", _INSIDE)

    def place(self, directory: str) -> str:
        """See `Launcher`."""
        return _INSIDE

    async def removed(self, directory: str) -> None:
        """See `Launcher`. The processes end with bwrap, and its file systems with them."""

    def late(self, seconds: float) -> AsyncmoeError:
        """See `Launcher`."""
        return WaitTimeout("the guard of the python tool", "end", seconds)

    def refused(self, got: str) -> ConfigError:
        """See `Launcher`."""
        hint = "allow unprivileged user namespaces, or use another backend"
        return ConfigError(KEY, got=f"bubblewrap, which says: {got}", expected="a bwrap that confines a program", hint=hint)


def _read_only(python: str) -> list[str]:
    """Return the directories that Python needs, without those inside others."""
    wanted = {"/usr", str(Path(python).parents[1]), os.path.realpath(sys.base_prefix)}
    return sorted(path for path in wanted if not any(Path(other) in Path(path).parents for other in wanted))
