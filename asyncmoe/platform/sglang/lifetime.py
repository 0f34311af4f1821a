"""Ends this process with its parent, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

PARENT = "ASYNCMOE_PARENT_PID"
"""Environment variable with the process id of a server's parent."""

API_KEY = "ASYNCMOE_ENGINE_KEY"
"""Environment variable with the key that a server requires of clients (its --api-key)."""

_PR_SET_PDEATHSIG = 1


def key_arguments(environ: Mapping[str, str]) -> list[str]:
    """Return SGLang's argument for the key, if there is one. It is a single word because a key may begin with a dash."""
    return [f"--api-key={environ[API_KEY]}"] if environ.get(API_KEY) else []


def end_with_parent() -> None:
    """Make Linux kill this process when its parent, named by `PARENT`, ends; exit at once if the parent has already ended.

    Also set `PARENT` to this process for its children. Without the variable (a server started by hand) only the children are bound
    to this process.
    A kernel that refuses this is told of once: then a killed parent leaves this process behind.
    """
    parent = os.environ.get(PARENT)
    os.environ[PARENT] = str(os.getpid())
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # SIGKILL, because on SIGTERM a server first waits for its requests, and no process is left to enforce its end.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        print(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}; not ended with its parent", file=sys.stderr, flush=True)
    # A parent that ended before prctl triggers no signal.
    if os.getppid() != int(parent):
        sys.exit(f"the process that started this one ({parent}) has ended")
