"""The tool "python": runs a program that a model wrote in bubblewrap, and returns its output.

A program (`asyncmoe.rollout.episodes.tools.inside`) sees /usr, a few devices and its own directory, which is in memory; none of this
machine's other files, processes or networks. It ends with bubblewrap, and all it has started with it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from asyncmoe.config.fields import Positive, Seconds
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.function import AsyncFunction
from asyncmoe.rollout.episodes.tools.runner import ToolLimits
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, FLOOD, TIMEOUT, ToolError
from asyncmoe.rollout.processes import end

_MIB = 2**20
_KEY = "environment.tools.options.python"
_DIRECTORY = "/sandbox"
_INSIDE = Path(__file__).with_name("inside.py").read_text()
_SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
_PROCESSES = 16
"""Processes and threads of a program: each has a memory of its own."""
_FIRST_VICTIM = "1000"
"""Of oom_score_adj (proc(5)): a machine or job without memory ends a program before it ends anything else."""
_USER = "65534"
"""nobody: the kernel does not limit the number of root's processes."""
_START_S = 30.0
_CHUNK = 65536


class PythonLimits(ToolLimits):
    """Limits of one program, and of the tool.

    Attributes:
        wall_s, cpu_s: wall-clock seconds, and CPU seconds of each of its processes, rounded up.
        memory_bytes: address space of each of its processes, including the interpreter's own.
        file_bytes: size of one file, and of all its files together, which are in memory.
        open_files: number of files that a process may have open at once.
        output_bytes: standard output and error together.
        code_bytes: size of the program.
    """

    wall_s: Seconds = 10.0
    cpu_s: Seconds = 5.0
    memory_bytes: Positive = 512 * _MIB
    file_bytes: Positive = 16 * _MIB
    open_files: Positive = 64
    output_bytes: Positive = 16384
    code_bytes: Positive = 65536


def python_tool(limits: PythonLimits) -> AsyncFunction:
    """Return the tool "python", tried with a program.

    Raises:
        ConfigError: bubblewrap does not work here, or a limit is too small for any program.
    """
    sandbox = Bubblewrap(limits)
    with ThreadPoolExecutor(1) as thread:  # with a loop of its own, because the caller may be inside one or outside
        try:
            got = thread.submit(asyncio.run, sandbox.python("print(1)")).result()
        except ToolError as error:
            got = " ".join(error.detail.removeprefix("error: ").split())
    if got != "1\n":
        hint = "allow unprivileged user namespaces, or name a function of your own that runs programs elsewhere"
        raise ConfigError(_KEY, got=f"{got} ({limits})", expected="limits and a bubblewrap with which print(1) runs", hint=hint)
    return AsyncFunction(sandbox.python, "python")


class Bubblewrap:
    """Programs on this machine, each by itself, under `PythonLimits`. A call of `python` raises

    ToolError: `ERROR`: the program is too large, or ended with a nonzero status; then the detail is its output, traceback included.
    `TIMEOUT`: it exceeded its wall-clock or CPU seconds. `FLOOD`: it exceeded its output limit. `CRASH`: a signal ended it, or the sandbox
    failed.

    Raises:
        ConfigError: a program that this needs is missing.
    """

    def __init__(self, limits: PythonLimits) -> None:
        self._limits = limits
        self._python = os.path.realpath(_found("python3", "python3", "/usr/local/bin:/usr/bin"))
        as_nobody = [_found("setpriv", "util-linux"), f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"] if os.geteuid() == 0 else []
        self._outside = [*as_nobody, _found("choom", "util-linux"), "-n", _FIRST_VICTIM, "--", _found("bwrap", "bubblewrap")]

    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints. Standard library only; no network."""
        program, pipe = code.encode(errors="replace"), asyncio.subprocess.PIPE
        if len(program) > self._limits.code_bytes:
            raise ToolError(ERROR, f"error: a program of {len(program)} bytes, more than {self._limits.code_bytes}")
        with tempfile.TemporaryFile() as said:
            process = await asyncio.create_subprocess_exec(
                *self.command(), stdin=pipe, stdout=pipe, stderr=said, env={}, start_new_session=True
            )
            try:
                await _begin(process, program, said)
                return await self._watch(process)
            finally:
                await end(process)

    def command(self) -> list[str]:
        """Return the command that runs the program on its standard input."""
        inside = (self._python, "-I", "-S", "-c", _INSIDE, json.dumps(_rlimits(self._limits)))
        return [*self._outside, *self._around(), "--", *inside]

    def _around(self) -> Iterator[str]:
        yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv")
        yield from ("--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr")
        for path in _SYSTEM:
            if os.path.islink(path):
                yield from ("--symlink", os.readlink(path), path)
            elif os.path.isdir(path):
                yield from ("--ro-bind", path, path)
        yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
        # The file systems in memory that bwrap makes for itself have no limit.
        yield from ("--dev", "/dev", "--remount-ro", "/dev")
        yield from ("--perms", "0700", "--size", str(self._limits.file_bytes), "--tmpfs", _DIRECTORY)
        yield from ("--remount-ro", "/", "--chdir", _DIRECTORY)

    async def _watch(self, process: asyncio.subprocess.Process) -> str:
        """Return a program's output. Raises ToolError."""
        assert process.stdout is not None
        limits, begin, output = self._limits, time.monotonic(), bytearray()
        try:
            async with asyncio.timeout(limits.wall_s):
                while len(output) <= limits.output_bytes and (chunk := await process.stdout.read(_CHUNK)):
                    output += chunk
                text = _text(output[: limits.output_bytes])
                if len(output) > limits.output_bytes:
                    raise ToolError(FLOOD, f"{text}\n[cut at {limits.output_bytes} bytes]")
                status = await process.wait()
        except TimeoutError as error:
            said = _said(_text(output), f"the program took longer than {limits.wall_s:g} s")
            raise ToolError(TIMEOUT, said) from error
        # As a shell does, bwrap says 128 + n for signal n.
        number = status - 128 if status - 128 in signal.valid_signals() else max(-status, 0)
        if number == signal.SIGXCPU or (number == signal.SIGKILL and time.monotonic() - begin > limits.cpu_s):
            raise ToolError(TIMEOUT, _said(text, f"the program took more than {limits.cpu_s:g} s of CPU time"))
        if number:
            raise ToolError(CRASH, _said(text, f"the program was ended by {signal.Signals(number).name}"))
        if status:
            raise ToolError(ERROR, text or _said("", f"the program ended with status {status}"))
        return text


async def _begin(process: asyncio.subprocess.Process, program: bytes, said: IO[bytes]) -> None:
    """Give a sandbox its program, and wait until it begins. Raises ToolError."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            with suppress(ConnectionError):  # one that ended early has said why
                process.stdin.write(program)
                await process.stdin.drain()
            process.stdin.close()
            if await process.stdout.read(1):
                return
    except TimeoutError as error:
        raise ToolError(CRASH, f"error: bubblewrap started no program within {_START_S:g} s") from error
    said.seek(0)
    last = said.read(_CHUNK).decode(errors="replace").strip().rpartition("\n")[2]
    raise ToolError(CRASH, f"error: bubblewrap says: {last[:300] or 'nothing'}")


def _rlimits(limits: PythonLimits) -> dict[str, tuple[int, int]]:
    """Return limits of each process (setrlimit(2))."""
    cpu_s = math.ceil(limits.cpu_s)
    most = {"AS": limits.memory_bytes, "FSIZE": limits.file_bytes, "NOFILE": limits.open_files, "NPROC": _PROCESSES}
    most |= {"CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}
    return {"RLIMIT_CPU": (cpu_s, cpu_s + 1), **{f"RLIMIT_{name}": (value, value) for name, value in most.items()}}


def _found(program: str, package: str, where: str | None = None) -> str:
    path = shutil.which(program, path=where)
    if path is None:
        hint = f"install {package}, or name a function of your own that runs programs elsewhere"
        raise ConfigError("environment.tools.names", got=f"python, and no program {program}", expected="one that confines it", hint=hint)
    return path


def _text(output: bytes | bytearray) -> str:
    """Return the output; tracebacks name the program's file without its directory."""
    return output.decode(errors="replace").replace(f'File "{_DIRECTORY}/', 'File "')


def _said(text: str, error: str) -> str:
    return "\n".join([*text.splitlines(), f"error: {error}"])
