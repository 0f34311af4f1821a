"""The first program inside a sandbox: `python -I -S -c SOURCE LIMITS`, with the policy's program on standard input.

Runs without asyncmoe, on Python 3.9 or newer. LIMITS is a JSON object: name of a limit in the module `resource` -> soft and hard limit. A
zero byte on standard output announces the policy's program; its output follows, errors included.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys

_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1


def main(limits: dict[str, tuple[int, int]]) -> None:
    """Become the program on standard input. Never returns."""
    with open("main.py", "wb") as file:
        file.write(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Close descriptors that the rollout worker leaks, as uvloop does, and those of bubblewrap.
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for name, (soft, hard) in limits.items():
        resource.setrlimit(getattr(resource, name), (soft, hard))
    # The user's keyring may hold tickets and passwords; a container has its own, and may refuse the call.
    ctypes.CDLL(None).syscall(_KEYCTL[os.uname().machine], _JOIN_SESSION_KEYRING, None)
    os.write(1, b"\0")
    os.dup2(1, 2)
    here = os.getcwd()
    environment = {"HOME": here, "TMPDIR": here, "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-u", "-X", "utf8", "main.py"], environment)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
