"""The tool "python": runs a program that a model wrote in a sandbox, and returns its output.

`asyncmoe.rollout.episodes.tools.sandboxes` has the sandboxes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal, Protocol

from asyncmoe.config.fields import Positive, Seconds, Section
from asyncmoe.rollout.episodes.tools.tool import CRASH, ERROR, FLOOD, TIMEOUT, ToolError, one_string

_MIB = 2**20


class PythonLimits(Section):
    """Limits of one program.

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


@dataclass(frozen=True)
class ProgramEnded:
    """How a program ended.

    Attributes:
        output: standard output and error, at most `PythonLimits.output_bytes`.
        flooded: True if there was more output; then the other attributes say nothing.
        status: exit status, or the negative number of the signal that ended it.
        timeout: the limit that ended it, or None.
    """

    output: str
    flooded: bool = False
    status: int = 0
    timeout: Literal["wall", "cpu"] | None = None


class Sandbox(Protocol):
    """A place where programs run under `PythonLimits`, each by itself. Programs run concurrently."""

    name: str
    """For messages."""
    hint: str | None
    """What to do if it does not work."""

    async def run(self, program: bytes) -> ProgramEnded:
        """Run a program. If cancelled, end it.

        Raises:
            ToolError: `CRASH`: the sandbox failed.
            WaitTimeout: something that is ours did not end.
        """
        ...

    async def close(self) -> None:
        """Wait until every program has ended."""
        ...


class PythonTool:
    """The tool "python". Its `Runner` limits concurrent calls.

    Args:
        sandbox: where programs run; see `asyncmoe.rollout.episodes.tools.sandboxes`.
    """

    name = "python"
    description = "Runs a Python program and returns what it prints. Standard library only; no network."
    parameters = one_string("code", "the program")

    def __init__(self, limits: PythonLimits, sandbox: Sandbox) -> None:
        self._limits, self._sandbox = limits, sandbox

    async def call(self, argument: str) -> str:
        """Run a program and return its output.

        Raises:
            ToolError: `ERROR`: the program is too large, or ended with a nonzero status; then the detail is its output, traceback included.
                `TIMEOUT`: it exceeded its wall-clock or CPU seconds. `FLOOD`: it exceeded its output limit. `CRASH`: a signal ended it, or
                the sandbox failed.
            WaitTimeout: the program did not end.
        """
        code, limits = argument.encode(errors="replace"), self._limits
        if len(code) > limits.code_bytes:
            raise ToolError(ERROR, f"error: a program of {len(code)} bytes, more than {limits.code_bytes}")
        ended = await self._sandbox.run(code)
        text, status = ended.output, ended.status
        if ended.flooded:
            raise ToolError(FLOOD, f"{text}\n[cut at {limits.output_bytes} bytes]")
        if ended.timeout == "wall":
            raise ToolError(TIMEOUT, _said(text, f"the program took longer than {limits.wall_s:g} s"))
        if ended.timeout == "cpu":
            raise ToolError(TIMEOUT, _said(text, f"the program took more than {limits.cpu_s:g} s of CPU time"))
        if status < 0:
            raise ToolError(CRASH, _said(text, f"the program was ended by {_signal_name(-status)}"))
        if status > 0:
            raise ToolError(ERROR, text or _said("", f"the program ended with status {status}"))
        return text

    async def close(self) -> None:
        """See `Sandbox`."""
        await self._sandbox.close()


def _said(text: str, error: str) -> str:
    return "\n".join([*text.splitlines(), f"error: {error}"])


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
