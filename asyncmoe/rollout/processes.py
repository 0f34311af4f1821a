"""Processes for functions that may hang, end their process or hold the interpreter: users' scorers and tools, and mathematics.

A process answers one request at a time, each a line of JSON (`asyncmoe.rollout.process_worker`). Callers set the time limits: a process
whose call is cancelled is killed, with its process group, so that a late answer is not taken for the next call's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from asyncmoe.errors import AsyncmoeError, ConfigError, WaitTimeout

_START_S, _CLOSE_S = 60.0, 5.0
_LINE_BYTES = 2 << 20
"""Maximum length of an answer."""


class Broken(AsyncmoeError):
    """A process that has ended, or whose answer is too long (`flood`)."""

    def __init__(self, text: str, flood: bool = False) -> None:
        self.flood = flood
        super().__init__(text)


class Processes:
    """A pool of processes, one per concurrent request, started on demand and kept for later requests.

    Args:
        serve: "package.module:function" for `asyncmoe.rollout.process_worker`.
        given: keyword arguments of the function, as JSON values.
        whose: name of a process in errors.
        key: the key of the configuration that names the function.
    """

    def __init__(self, serve: str, given: Mapping[str, object], whose: str, key: str) -> None:
        self._serve, self._given, self._whose, self._key = serve, given, whose, key
        self._idle: list[asyncio.subprocess.Process] = []

    async def ask(self, what: object, timeout_s: float | None = None) -> Any:
        """Return the answer to a request.

        Args:
            timeout_s: limit for the answer, not counting the start of the process; None: the caller limits it.

        Raises:
            Broken: the process ended, or its answer is too long.
            ConfigError: the function cannot be loaded in a process.
            TimeoutError: there is no answer within `timeout_s`.
            AsyncmoeError: a process did not start.
        """
        process = self._idle.pop() if self._idle else await self._start()
        answer = await self._exchange(process, what, timeout_s)
        self._idle.append(process)
        return answer

    async def close(self) -> None:
        """Let the idle processes clean up, then end them; a running call ends its own process."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(self._close, idle))

    async def _start(self) -> asyncio.subprocess.Process:
        pipe, command = asyncio.subprocess.PIPE, (sys.executable, "-m", "asyncmoe.rollout.process_worker", self._serve)
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=_LINE_BYTES, start_new_session=True)
        try:
            unusable = await self._exchange(process, self._given, _START_S)
        except TimeoutError as error:
            raise WaitTimeout(self._whose, f"its start with {self._given}", _START_S) from error
        except Broken as broken:
            raise AsyncmoeError(f"{self._whose} did not start with {self._given}: {broken}") from broken
        if unusable:
            await end(process)
            raise ConfigError(self._key, got=unusable, expected="a function that loads in a separate process")
        return process

    async def _exchange(self, process: asyncio.subprocess.Process, what: object, timeout_s: float | None) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(what).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
                if not line.endswith(b"\n"):
                    raise Broken(f"{self._whose} ended with status {await process.wait()}")
                return json.loads(line)
        except BaseException as error:
            await end(process)
            if isinstance(error, ConnectionError):
                raise Broken(f"{self._whose} has ended: {error}") from error
            if isinstance(error, ValueError):  # a line beyond the limit
                raise Broken(f"{self._whose} answered with too many bytes", flood=True) from error
            raise

    async def _close(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _CLOSE_S)
        await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill the process group that a process leads, and wait for the process, reading its output meanwhile."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):  # a process that left the group may hold its pipes
        await asyncio.wait_for(process.communicate(), _CLOSE_S)
