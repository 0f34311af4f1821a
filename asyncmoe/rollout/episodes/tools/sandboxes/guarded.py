"""Programs that the guard (`asyncmoe.rollout.episodes.tools.guard`) starts, limits, watches and ends, on this machine or in a container.

The guard applies the limits and the filter of system calls in every backend; what is around it differs: `Launcher`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from asyncmoe.errors import AsyncmoeError, ConfigError, WaitTimeout
from asyncmoe.rollout.episodes.tools.sandbox import ProgramEnded, PythonLimits
from asyncmoe.rollout.episodes.tools.tool import CRASH, ToolError

GUARD = Path(__file__).parents[1] / "guard.py"
_FILE = "main.py"
_PROBE_S = 30.0
_GRACE_S = 10.0
"""Seconds for the guard to start and to end, in addition to the program's own time."""
_MIB = 2**20
_ADVICE = ("Run '", "See '", '{"status"')
"""How docker ends what it says, and the guard: with a report that says less than the lines before."""


class Launcher(Protocol):
    """How the guard is started, and around it what confines it besides."""

    environment: Mapping[str, str]
    """All variables of the command."""
    more_s: float
    """Seconds that its start may take beyond the guard's."""

    def command(self, directory: str) -> list[str]:
        """Return the command; `directory` is its working directory, unique and empty."""
        ...

    def place(self, directory: str) -> str:
        """Return the program's working directory, as the program sees it."""
        ...

    async def removed(self, directory: str) -> None:
        """Remove what may be left after the command was killed."""
        ...

    def late(self, seconds: float) -> AsyncmoeError:
        """Return the error for a command that has not ended within `seconds`, though the program's time was over."""
        ...

    def refused(self, got: str) -> ConfigError:
        """Return the error for a first program that did not run."""
        ...


class Guarded:
    """Programs started and watched by the guard. See `Sandbox`."""

    def __init__(self, limits: PythonLimits, launcher: Launcher) -> None:
        self._limits, self._launcher = limits, launcher
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self, program: bytes) -> ProgramEnded:
        """See `Sandbox`."""
        directory = tempfile.mkdtemp(prefix="tool-")
        try:
            return await self._run(program, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    async def close(self) -> None:
        """See `Sandbox`."""
        await asyncio.gather(*self._ending)

    def probe(self) -> None:
        """See `Sandbox`."""
        with tempfile.TemporaryDirectory(prefix="tool-") as directory:
            try:
                done = subprocess.run(
                    self._launcher.command(directory),
                    input=b"print('ready')",
                    capture_output=True,
                    cwd=directory,
                    env=dict(self._launcher.environment),
                    timeout=_PROBE_S + self._launcher.more_s,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise self._launcher.refused(f"nothing within {error.timeout:g} s") from error
            except OSError as error:
                raise self._launcher.refused(f"{error.filename}: {error.strerror}") from error
        if done.stdout != b"ready\n":
            lines = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
            told = [line.strip() for line in lines if line.strip() and not line.startswith(_ADVICE)] or ["nothing"]
            raise self._launcher.refused(told[-1])

    async def _run(self, code: bytes, directory: str) -> ProgramEnded:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._launcher.command(directory),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=directory,
            env=dict(self._launcher.environment),
            start_new_session=True,
        )
        handle, report = _handle(process), None
        seconds = self._limits.wall_s + _GRACE_S + self._launcher.more_s
        try:
            async with asyncio.timeout(seconds):
                output, flooded = await self._output(process, code)
                if flooded:
                    return ProgramEnded(self._text(output, directory), flooded=True)
                assert process.stderr is not None
                report = (await process.stderr.read(_MIB)).decode(errors="replace")
        except TimeoutError as error:
            raise self._launcher.late(seconds) from error
        finally:
            await self._end(process, handle, directory, killed=report is None)
        return self._ended(_reported(report), self._text(output, directory))

    async def _output(self, process: asyncio.subprocess.Process, code: bytes) -> tuple[bytes, bool]:
        """Return the output up to its limit, and True if there was more."""
        assert process.stdin is not None
        assert process.stdout is not None
        # A guard that ended early has reported the reason.
        with suppress(ConnectionError):
            process.stdin.write(code)
            await process.stdin.drain()
        process.stdin.close()
        output = bytearray()
        while len(output) <= self._limits.output_bytes and (chunk := await process.stdout.read(65536)):
            output += chunk
        return bytes(output[: self._limits.output_bytes]), len(output) > self._limits.output_bytes

    def _ended(self, reported: dict[str, Any], text: str) -> ProgramEnded:
        status = reported["status"]
        if reported["timeout"]:
            return ProgramEnded(text, status=status, timeout="wall")
        # Process 1 of a namespace ignores SIGXCPU and is killed a second later; the limit and the report count CPU time differently.
        cpu = status == -signal.SIGXCPU or (status == -signal.SIGKILL and reported["cpu_s"] > 0.8 * self._limits.cpu_s)
        return ProgramEnded(text, status=status, timeout="cpu" if cpu else None)

    def _text(self, output: bytes, directory: str) -> str:
        """Return the output without the name of the directory: outside it may differ in every run; inside, only tracebacks name it."""
        place, text = self._launcher.place(directory), output.decode(errors="replace")
        return text.replace(f"{place}/", "") if place == directory else text.replace(f'File "{place}/', 'File "')

    async def _end(self, process: asyncio.subprocess.Process, handle: int | None, directory: str, *, killed: bool) -> None:
        """End the guard, and with it the program, even if the waiting caller is cancelled again."""

        async def end() -> None:
            await _ended_for_sure(process, handle)
            if killed:
                await self._launcher.removed(directory)

        ending = asyncio.create_task(end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)


def settings(limits: PythonLimits, seccomp_filter: str, python: str, directory: str) -> dict[str, Any]:
    """Return the guard's settings for one program that runs in `directory`, in the guard's own root and without a known parent."""
    cpu_s = math.ceil(limits.cpu_s)
    return {
        "parent": None,
        "program": [python, "-I", "-S", "-u", "-X", "utf8", _FILE],
        "file": _FILE,
        "environment": {"HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"},
        "wall_s": limits.wall_s,
        "rlimits": {
            resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
            resource.RLIMIT_AS: (limits.memory_bytes, limits.memory_bytes),
            resource.RLIMIT_FSIZE: (limits.file_bytes, limits.file_bytes),
            resource.RLIMIT_NOFILE: (limits.open_files, limits.open_files),
            resource.RLIMIT_CORE: (0, 0),
        },
        "seccomp": seccomp_filter,
        "root": None,
        "landlock": False,
    }


def _handle(process: asyncio.subprocess.Process) -> int | None:
    """Return a pidfd, which never signals another process, or None if the process has already ended."""
    try:
        return os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None


async def _ended_for_sure(process: asyncio.subprocess.Process, handle: int | None) -> None:
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if handle is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await asyncio.gather(process.wait(), _drained(process.stdout), _drained(process.stderr))
                    return
        raise WaitTimeout("the guard of the python tool", "end", _GRACE_S)
    finally:
        if handle is not None:
            os.close(handle)


async def _drained(stream: asyncio.StreamReader | None) -> None:
    """Discard the rest of a stream: `wait` returns only at the end of both streams, and a stream with a full buffer never ends."""
    assert stream is not None
    while await stream.read(65536):
        pass


def _reported(report: str) -> dict[str, Any]:
    """Parse the last line of the guard's report.

    Raises:
        ToolError: `CRASH`: the line is not JSON.
    """
    line = report.strip().rpartition("\n")[2]
    try:
        ended: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ToolError(CRASH, f"error: the sandbox failed: {line[:300]}") from error
    return ended
