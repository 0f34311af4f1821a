"""Runs Python code that a model wrote in a sandbox built from Linux's own mechanisms, without a container runtime.

Each call runs a new `python -I -S` (standard library only) in an empty directory, started by `asyncmoe.rollout.episodes.tools.guard`. The
program's output is the observation.

Guaranteed always, on Linux on x86-64 and ARM64 (`asyncmoe.rollout.episodes.tools.seccomp`):
- the program may start threads, but it starts and signals no process; it is killed when its call ends, is cancelled or times out, and when
  the controller dies;
- it opens no socket, so it reaches neither the network nor a service of this machine;
- `PythonLimits` limit its wall-clock and CPU seconds, address space, file size, open files and output; output beyond the limit ends it;
- it inherits no variable, no open file and no capability.

Guaranteed with `namespaces` (user, mount, process, network and IPC; unprivileged on most kernels from 5.12 on, refused in many containers):
- every file system is read-only and without devices, except its own directory, which is in memory, limited in size, and removed afterwards;
- it sees no other process; /proc is empty.

Not guaranteed:
- protection against reading. It may read every file that the controller's user may read. Keep secrets out of that user's reach;
- with `namespaces: false`, protection against writing: it may change everything that the controller's user may change. Use this only on a
  machine that you can afford to lose;
- protection against kernel vulnerabilities. The sandbox contains a model that explores, not an attacker.

RLIMIT_NPROC is not used: it does not limit root, counts all of a user's processes on older kernels, and there are no processes to count.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncmoe.errors import ConfigError, WaitTimeout
from asyncmoe.rollout.episodes.tools import seccomp
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, FLOOD, TIMEOUT, ToolError, one_string

log = logging.getLogger(__name__)
_GUARD = Path(__file__).with_name("guard.py")
_FILE = "main.py"
_PROBE_S = 30.0
_GRACE_S = 10.0
"""Seconds for the guard to start and to end, in addition to the program's own time."""
_MIB = 2**20


@dataclass(frozen=True)
class PythonLimits:
    """Limits of one program.

    Attributes:
        wall_s, cpu_s: wall-clock seconds, and CPU seconds of all threads, rounded up.
        memory_bytes: address space, including the interpreter's own.
        file_bytes: size of one file; with namespaces also of all its files together, which are in memory.
        open_files: number of files open at once.
        output_bytes: standard output and error together.
        code_bytes: size of the program.
        namespaces: require namespaces; see the module.
    """

    wall_s: float = 10.0
    cpu_s: float = 5.0
    memory_bytes: int = 512 * _MIB
    file_bytes: int = 16 * _MIB
    open_files: int = 64
    output_bytes: int = 16384
    code_bytes: int = 65536
    namespaces: bool = True


class PythonTool:
    """The tool "python". Its `Runner` limits concurrent calls.

    Raises:
        ConfigError: this machine cannot provide the guarantees.
    """

    name = "python"
    description = "Runs a Python program and returns what it prints. Standard library only; no network, no other processes."
    parameters = one_string("code", "the program")

    def __init__(self, limits: PythonLimits) -> None:
        self._limits = limits
        self._filter = seccomp.program().hex()
        self._ending: set[asyncio.Task[None]] = set()
        self._probe()
        if not limits.namespaces:
            log.warning("the python tool runs without namespaces: its code may write wherever this user can")

    async def call(self, argument: str) -> str:
        """Run a program and return its output.

        Raises:
            ToolError: `ERROR`: the program is too large, or ended with a nonzero status; then the detail is its output, traceback included.
                `TIMEOUT`: it exceeded its wall-clock or CPU seconds. `FLOOD`: it exceeded its output limit. `CRASH`: a signal ended it, or
                the sandbox failed.
            WaitTimeout: the guard did not end.
        """
        code = argument.encode(errors="replace")
        if len(code) > self._limits.code_bytes:
            raise ToolError(ERROR, f"error: a program of {len(code)} bytes, more than {self._limits.code_bytes}")
        directory = tempfile.mkdtemp(prefix="tool-")
        try:
            return await self._run(code, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    async def close(self) -> None:
        """Wait until every guard has ended."""
        await asyncio.gather(*self._ending)

    async def _run(self, code: bytes, directory: str) -> str:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command(directory), stdin=pipe, stdout=pipe, stderr=pipe, cwd=directory, env={}, start_new_session=True
        )
        handle = _handle(process)
        seconds = self._limits.wall_s + _GRACE_S
        try:
            async with asyncio.timeout(seconds):
                output, flooded = await self._output(process, code)
                if flooded:
                    raise ToolError(FLOOD, f"{self._text(output, directory)}\n[cut at {self._limits.output_bytes} bytes]")
                assert process.stderr is not None
                report = (await process.stderr.read(_MIB)).decode(errors="replace")
        except TimeoutError as error:
            raise WaitTimeout("the guard of the python tool", "end", seconds) from error
        finally:
            await self._end(process, handle)
        return self._result(_ended(report), self._text(output, directory))

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

    def _result(self, ended: dict[str, Any], text: str) -> str:
        status, limits = ended["status"], self._limits
        if ended["timeout"]:
            raise ToolError(TIMEOUT, _said(text, f"the program took longer than {limits.wall_s:g} s"))
        # Process 1 of a namespace ignores SIGXCPU and is killed a second later; the limit and the report count CPU time differently.
        if status == -signal.SIGXCPU or (status == -signal.SIGKILL and ended["cpu_s"] > 0.8 * limits.cpu_s):
            raise ToolError(TIMEOUT, _said(text, f"the program took more than {limits.cpu_s:g} s of CPU time"))
        if status < 0:
            raise ToolError(CRASH, _said(text, f"the program was ended by {signal.Signals(-status).name}"))
        if status > 0:
            raise ToolError(ERROR, text or _said("", f"the program ended with status {status}"))
        return text

    def _text(self, output: bytes, directory: str) -> str:
        """Return the output without the name of the directory, which differs in every run."""
        return output.decode(errors="replace").replace(f"{directory}/", "")

    def _command(self, directory: str) -> list[str]:
        limits = self._limits
        cpu_s = math.ceil(limits.cpu_s)
        settings = {
            "parent": os.getpid(),
            "program": [sys.executable, "-I", "-S", "-u", "-X", "utf8", _FILE],
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
            "seccomp": self._filter,
            "namespaces": limits.namespaces,
            "disk_bytes": limits.file_bytes,
        }
        return [sys.executable, "-I", "-S", str(_GUARD), json.dumps(settings)]

    async def _end(self, process: asyncio.subprocess.Process, handle: int | None) -> None:
        """End the guard, and with it the program, even if the waiting caller is cancelled again."""
        ending = asyncio.create_task(_ended_for_sure(process, handle))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)

    def _probe(self) -> None:
        """Run a program to verify that this machine can confine one.

        Raises:
            ConfigError: this machine cannot.
        """
        with tempfile.TemporaryDirectory(prefix="tool-") as directory:
            try:
                done = subprocess.run(
                    self._command(directory),
                    input=b"print('ready')",
                    capture_output=True,
                    cwd=directory,
                    env={},
                    timeout=_PROBE_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise WaitTimeout("the guard of the python tool", "end a first program", _PROBE_S) from error
        if done.stdout != b"ready\n":
            lines = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines() or ["nothing"]
            hint = "allow unprivileged user namespaces (kernel 5.12+), or set namespaces=false where the code may write what this user may"
            raise ConfigError(
                "tools python", got=lines[-1], expected="a kernel that confines a program", hint=hint if self._limits.namespaces else None
            )


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


def _said(text: str, error: str) -> str:
    return "\n".join([*text.splitlines(), f"error: {error}"])


def _ended(report: str) -> dict[str, Any]:
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
