"""Ends this process with its parent, however the parent ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from asyncmoe.process import die_with_parent

PARENT = "ASYNCMOE_PARENT_PID"
"""Environment variable with the process id of a server's parent."""

API_KEY = "ASYNCMOE_ENGINE_KEY"
"""Environment variable with the key that a server requires from clients (its --api-key)."""


def key_arguments(environ: Mapping[str, str]) -> list[str]:
    """Return SGLang's argument for the key, if there is a key. It is a single word because a key may begin with a dash."""
    return [f"--api-key={environ[API_KEY]}"] if environ.get(API_KEY) else []


def end_with_parent() -> None:
    """Have Linux kill this process when its parent, named by `PARENT`, ends; exit at once if the parent has already ended.

    Also set `PARENT` to this process for its children. Without the variable (a server started by hand) only the children are bound
    to this process.
    """
    parent = os.environ.get(PARENT)
    os.environ[PARENT] = str(os.getpid())
    if parent is not None:
        # SIGKILL, because on SIGTERM a server first waits for its requests, and no process is left to enforce its end.
        die_with_parent(int(parent), signal.SIGKILL)
