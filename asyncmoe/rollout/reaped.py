"""Processes of a user's code, which end with every process that they have started (`asyncmoe.rollout.episodes.tools.reaper`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncmoe.errors import WaitTimeout

_REAPER = Path(__file__).parent / "episodes" / "tools" / "reaper.py"
_KILL_S = 5.0
SAID_BYTES = 1 << 18
"""What a process may write to our standard error, which is a log of the run."""


async def start(command: Sequence[str], limit: int, said: int = SAID_BYTES, **more: Any) -> asyncio.subprocess.Process:
    """Start a command with pipes as its standard input and output.

    Args:
        limit: bytes of its longest line.
        said: bytes that it may write to standard error; 0: any number.
        more: for `asyncio.create_subprocess_exec`.
    """
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *ending_all(command, said), stdin=pipe, stdout=pipe, limit=limit, start_new_session=True, **more
    )


def ending_all(command: Sequence[str], said: int = SAID_BYTES) -> tuple[str, ...]:
    """Return the command that runs a command, and ends with every process that it has started."""
    return (sys.executable, "-I", "-S", str(_REAPER), str(os.getpid()), str(said), *command)


class Broken(Exception):
    """A process that has ended, or whose answer is too long (`flood`). The text continues "the process"."""

    def __init__(self, text: str, flood: bool = False) -> None:
        self.flood = flood
        super().__init__(text)


async def exchange(process: asyncio.subprocess.Process, told: object | None = None) -> Any:
    """Write a line of JSON, unless it is None, and read one. Raises Broken."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if told is not None:
            process.stdin.write(json.dumps(told).encode() + b"\n")
            await process.stdin.drain()
        line = await process.stdout.readline()
    except ConnectionError as error:
        raise Broken(f"has ended: {error}") from error
    except ValueError as error:
        raise Broken("answered with too many bytes", flood=True) from error
    if not line:
        raise Broken(f"ended with status {await process.wait()}")
    try:
        return json.loads(line)
    except ValueError as error:
        raise Broken(f"ended within an answer: {line[:100]!r}") from error


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
            await asyncio.wait_for(process.wait(), _KILL_S)
            return
    raise WaitTimeout(whose, "end", _KILL_S)
