"""What this machine's kernel offers to confine programs with, and what refuses user namespaces."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

_LANDLOCK_CREATE, _VERSION = 444, 1
_SWITCHES = (
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)
"""Files of /proc/sys, the value that refuses user namespaces to some or all, and the sysctl that allows them. The second is Debian's, the
third Ubuntu's from 23.10 on; root is not bound by either."""


def landlock_version() -> int:
    """Return the version of Landlock, by which a process without any privilege gives up files (landlock(7)); 0: there is none."""
    if platform.system() != "Linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(_LANDLOCK_CREATE, None, 0, _VERSION)))


def counts_in_namespaces(release: str = platform.release()) -> bool:
    """Return whether RLIMIT_NPROC counts processes of a user namespace, not all of the user outside: Linux 5.14."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (5, 14)


def refusing_switches(proc_sys: Path = Path("/proc/sys")) -> tuple[str, ...]:
    """Return the sysctl settings, as `name=value`, that would allow user namespaces where one is set against them."""
    found = []
    for name, refusing, allowing in _SWITCHES:
        file = proc_sys / name
        if file.exists() and file.read_text().strip() == refusing:
            found.append(allowing)
    return tuple(found)
