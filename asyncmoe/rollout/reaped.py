"""Processes of a user's code, which end with every process that they have started (`asyncmoe.rollout.episodes.tools.reaper`)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from asyncmoe.errors import WaitTimeout

_REAPER = Path(__file__).parent / "episodes" / "tools" / "reaper.py"
_KILL_S = 5.0
SAID_BYTES = 1 << 18
"""What a process may write to our standard error, which is a log of the run."""


async def start(command: Sequence[str], limit: int) -> asyncio.subprocess.Process:
    """Start a command with pipes as its standard input and output.

    Args:
        limit: bytes of its longest line.
    """
    pipe = asyncio.subprocess.PIPE
    reaper = (sys.executable, "-I", "-S", str(_REAPER), str(os.getpid()), str(SAID_BYTES))
    return await asyncio.create_subprocess_exec(*reaper, *command, stdin=pipe, stdout=pipe, limit=limit, start_new_session=True)


async def end(process: asyncio.subprocess.Process, whose: str) -> None:
    """End the process and all that it has started; one that has ended by itself has ended them too.

    Raises:
        WaitTimeout: they could not be killed.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(number)
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILL_S):
                await process.wait()
                return
    raise WaitTimeout(whose, "end", _KILL_S)
