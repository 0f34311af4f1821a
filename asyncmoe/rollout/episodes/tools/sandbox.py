"""The tool "python": runs a model's programs in bubblewrap, a container or on a server, and returns their output."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from asyncmoe.config.fields import Positive, Seconds
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.runner import ToolLimits
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, FLOOD, KILLED, TIMEOUT, ToolError
from asyncmoe.rollout.processes import end

MIB = 2**20
WAYS = (
    "bubblewrap needs the packages bubblewrap and util-linux, and user namespaces; without them, set environment.sandbox.image (docker or "
    "podman) or environment.sandbox.url (a server of your own)"
)
DIRECTORY = "/sandbox"
"""The program's working directory, in memory."""
INSIDE = Path(__file__).with_name("inside.py").read_text()
_SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
PROCESSES = 16
"""Maximum processes and threads of a program, because the memory limit applies to each process."""
FIRST_VICTIM = "1000"
"""Value of oom_score_adj (proc(5)): a machine or job that runs out of memory kills a program before anything else."""
NOBODY = "65534"
"""User ID of programs instead of root's, because the kernel does not limit the number of root's processes."""
_ADVICE = ("Run '", "See '")
"""Beginnings of docker's last lines that give no reason."""
_CHUNK = 65536
_REMOVE_S = 20.0


class PythonLimits(ToolLimits):
    """Limits of one program, and of the tool.

    Attributes:
        wall_s, cpu_s: wall-clock seconds, and CPU seconds of each of its processes, rounded up.
        memory_bytes: address space of each of its processes, including the interpreter's own.
        file_bytes: size of one file, and of all files together, which are in memory.
        open_files: number of files that a process may have open at once.
        output_bytes: standard output and error together.
        code_bytes: size of the program.
    """

    wall_s: Seconds = 10.0
    cpu_s: Seconds = 5.0
    memory_bytes: Positive = 512 * MIB
    file_bytes: Positive = 16 * MIB
    open_files: Positive = 64
    output_bytes: Positive = 16384
    code_bytes: Positive = 65536


class Ended(msgspec.Struct, frozen=True):
    """How a program ended; also the JSON answer of a server.

    Attributes:
        output: standard output and error, at most `PythonLimits.output_bytes`.
        status: exit status; -n: signal n ended it.
        timeout: the limit that it exceeded, wall-clock or CPU seconds; None: neither.
        flooded: True if there was more output.
    """

    output: str
    status: Annotated[int, msgspec.Meta(ge=-64, le=255)] = 0
    timeout: Literal["wall", "cpu"] | None = None
    flooded: bool = False


class Sandbox(ABC):
    """Runs each program in a command on this machine, which starts `inside.py`.

    Attributes:
        name: name of the confinement, for messages.
        hint: what to do if it does not work.
        environment: variables of the command.
        start_s: seconds in which a program must begin.
    """

    name = "bubblewrap"
    hint = WAYS
    environment: Mapping[str, str] = {}
    start_s = 30.0

    def __init__(self, limits: PythonLimits) -> None:
        self.limits = limits

    @abstractmethod
    def command(self, name: str) -> list[str]:
        """Return the command that runs the program on its standard input; `name` is unique."""

    def removal(self, name: str) -> list[str]:
        """Return the command that cleans up after `command` was killed; empty if nothing remains."""
        return []

    async def run(self, program: bytes) -> Ended:
        """Run a program; if cancelled, end it. Raises ToolError: `CRASH`: the sandbox failed."""
        name = f"asyncmoe-{uuid.uuid4().hex}"
        starting = asyncio.create_task(self._start(name, program))
        try:
            return await self._watch(await asyncio.shield(starting))
        finally:
            await asyncio.wait([starting])  # only from then on does everything in a sandbox end with its command
            if starting.exception() is None:
                await self._end(starting.result(), name)

    async def _start(self, name: str, program: bytes) -> asyncio.subprocess.Process:
        """Start the command, and return it once the program has begun. Raises ToolError."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self.command(name), stdin=pipe, stdout=pipe, stderr=pipe, env=dict(self.environment), start_new_session=True
        )
        try:
            await self._begin(process, program)
        except ToolError:
            await self._end(process, name)
            raise
        return process

    async def _end(self, process: asyncio.subprocess.Process, name: str) -> None:
        killed = process.returncode is None
        await end(process)
        if killed and (removal := self.removal(name)):
            remove = partial(subprocess.run, removal, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True)
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(remove, timeout=_REMOVE_S, check=False)

    async def _begin(self, process: asyncio.subprocess.Process, program: bytes) -> None:
        """Pass the program to the command, and wait until it begins. Raises ToolError."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(self.start_s):
                with suppress(ConnectionError):  # a command that ended early has printed why
                    process.stdin.write(program)
                    await process.stdin.drain()
                process.stdin.close()
                if await process.stdout.read(1):
                    return
                said = (await process.stderr.read()).decode(errors="replace").split("\n")
        except TimeoutError as error:
            raise ToolError(CRASH, f"error: {self.name} started no program within {self.start_s:g} s") from error
        last = next((line for line in reversed(said) if line.strip() and not line.startswith(_ADVICE)), "nothing")
        raise ToolError(CRASH, f"error: {self.name} says: {last[:300]}")

    async def _watch(self, process: asyncio.subprocess.Process) -> Ended:
        assert process.stdout is not None
        begin, output, most = time.monotonic(), bytearray(), self.limits.output_bytes
        try:
            async with asyncio.timeout(self.limits.wall_s):
                while len(output) <= most and (chunk := await process.stdout.read(_CHUNK)):
                    output += chunk
                if len(output) > most:
                    return Ended(_text(output[:most]), flooded=True)
                status = await process.wait()
        except TimeoutError:
            return Ended(_text(output), timeout="wall")
        # Like a shell, the commands report 128 + n for signal n.
        status = 128 - status if status - 128 in signal.valid_signals() else status
        spent = status == -signal.SIGXCPU or (status == -signal.SIGKILL and time.monotonic() - begin > self.limits.cpu_s)
        return Ended(_text(output), status=status, timeout="cpu" if spent else None)


class Bubblewrap(Sandbox):
    """A program sees /usr, a few devices and its own directory; none of this machine's other files, processes or networks. It ends with
    bubblewrap, as does everything it has started.

    Raises:
        ConfigError: bubblewrap, or a program that it needs, is missing.
    """

    def __init__(self, limits: PythonLimits) -> None:
        super().__init__(limits)
        python = os.path.realpath(_found("python3", "/usr/local/bin:/usr/bin"))
        as_nobody = [_found("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
        outside = [*as_nobody, _found("choom"), "-n", FIRST_VICTIM, "--", _found("bwrap"), *_around(limits)]
        most = {**rlimits(limits), "RLIMIT_NPROC": (PROCESSES, PROCESSES)}
        self._command = [*outside, "--", python, "-I", "-S", "-c", INSIDE, json.dumps(most)]

    def command(self, name: str) -> list[str]:
        """See `Sandbox`."""
        return self._command


def _around(limits: PythonLimits) -> Iterator[str]:
    yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv")
    yield from ("--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr")
    for path in _SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    # The in-memory file systems that bwrap makes for itself have no size limit.
    yield from ("--dev", "/dev", "--remount-ro", "/dev")
    yield from ("--perms", "0700", "--size", str(limits.file_bytes), "--tmpfs", DIRECTORY)
    yield from ("--remount-ro", "/", "--chdir", DIRECTORY)


def rlimits(limits: PythonLimits) -> dict[str, tuple[int, int]]:
    """Return the limits of each process (setrlimit(2)), without RLIMIT_NPROC, which would count the processes of all containers."""
    cpu_s = math.ceil(limits.cpu_s)
    most = {"AS": limits.memory_bytes, "FSIZE": limits.file_bytes, "NOFILE": limits.open_files}
    most |= {"CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}
    return {"RLIMIT_CPU": (cpu_s, cpu_s + 1), **{f"RLIMIT_{name}": (value, value) for name, value in most.items()}}


def _found(program: str, where: str | None = None) -> str:
    path = shutil.which(program, path=where)
    if path is None:
        raise ConfigError("environment.sandbox", got=f"no program {program}", expected="an installed sandbox", hint=WAYS)
    return path


async def printed(run: Callable[[bytes], Awaitable[Ended]], code: str, limits: PythonLimits) -> str:
    """Run a program; return its output if it succeeded.

    Args:
        run: as `Bubblewrap.run`.

    Raises:
        ToolError: `ERROR`: the program is too large, or ended with a nonzero status; then the detail is its output, traceback included.
            `TIMEOUT`: it exceeded its wall-clock or CPU seconds. `FLOOD`: it exceeded its output limit. `KILLED`: a signal ended it.
            `CRASH`: the sandbox failed.
    """
    program = code.encode(errors="replace")
    if len(program) > limits.code_bytes:
        raise ToolError(ERROR, f"error: a program of {len(program)} bytes, more than {limits.code_bytes}")
    ended = await run(program)
    text, status = ended.output, ended.status
    if ended.flooded:
        raise ToolError(FLOOD, f"{text}\n[cut at {limits.output_bytes} bytes]")
    if ended.timeout is not None:
        took = f"longer than {limits.wall_s:g} s" if ended.timeout == "wall" else f"more than {limits.cpu_s:g} s of CPU time"
        raise ToolError(TIMEOUT, _said(text, f"the program took {took}"))
    if status < 0:
        name = next((one.name for one in signal.Signals if one == -status), f"signal {-status}")
        raise ToolError(KILLED, _said(text, f"the program was ended by {name}"))
    if status:
        raise ToolError(ERROR, text or _said("", f"the program ended with status {status}"))
    return text


def _text(output: bytes | bytearray) -> str:
    """Return the output; tracebacks name the program's file without its directory."""
    return output.decode(errors="replace").replace(f'File "{DIRECTORY}/', 'File "')


def _said(text: str, error: str) -> str:
    return "\n".join([*text.splitlines(), f"error: {error}"])
