"""Ending with the process that started us, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

PARENT = "ASYNCMOE_PARENT_PID"
"""Environment variable by which the starter of a server says who it is."""

API_KEY = "ASYNCMOE_ENGINE_KEY"
"""Environment variable with what a server wants to be shown (its --api-key)."""

_PR_SET_PDEATHSIG = 1


def key_arguments(environ: Mapping[str, str]) -> list[str]:
    """SGLang's argument for the key, where there is one. In one word: a key may begin with a dash."""
    return [f"--api-key={environ[API_KEY]}"] if environ.get(API_KEY) else []


def end_with_parent() -> None:
    """Have Linux kill this process when its parent, named by `PARENT`, ends; exit at once when it has ended already.

    From then on this process is the parent named to those it starts. Without the variable (a server started by hand) only the
    processes it starts are bound to it.

    Raises:
        OSError: the kernel refused.
    """
    parent = os.environ.get(PARENT)
    os.environ[PARENT] = str(os.getpid())
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # SIGKILL: a server told to end politely first waits for its requests, and nobody is left to see to it.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # A parent that ended before the call above sends no signal.
    if os.getppid() != int(parent):
        sys.exit(f"the process that started this one ({parent}) has ended")
