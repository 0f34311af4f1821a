"""Programs on this machine, started, bounded and ended with what is around them (`walls`)."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
import uuid
from contextlib import suppress
from typing import IO

from asyncmoe.errors import WaitTimeout
from asyncmoe.rollout.episodes.tools.sandbox import ProgramEnded, PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes.walls import DIRECTORY, Wall
from asyncmoe.rollout.episodes.tools.tool import CRASH, ToolError

_END_S = 10.0
_CHUNK = 65536
_ADVICE = ("Run '", "See '")
"""How docker ends what it says."""


class LocalSandbox:
    """See `Sandbox`."""

    def __init__(self, limits: PythonLimits, wall: Wall) -> None:
        self._limits, self._wall = limits, wall
        self.name = wall.name
        self.hint: str | None = wall.hint
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self, program: bytes) -> ProgramEnded:
        """See `Sandbox`."""
        name, pipe = f"asyncmoe-{uuid.uuid4().hex}", asyncio.subprocess.PIPE
        with tempfile.TemporaryFile() as said:
            process = await asyncio.create_subprocess_exec(
                *self._wall.command(name), stdin=pipe, stdout=pipe, stderr=said, env=dict(self._wall.environment), start_new_session=True
            )
            try:
                await self._begin(process, program, said)
                return await self._watch(process)
            finally:
                # The program ends even if the waiting caller is cancelled again.
                ending = asyncio.create_task(self._end(process, name))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
                await asyncio.shield(ending)

    async def close(self) -> None:
        """See `Sandbox`."""
        await asyncio.gather(*self._ending)

    async def _begin(self, process: asyncio.subprocess.Process, program: bytes, said: IO[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        seconds = self._wall.start_s
        try:
            async with asyncio.timeout(seconds):
                with suppress(ConnectionError):  # one that ended early has said why
                    process.stdin.write(program)
                    await process.stdin.drain()
                process.stdin.close()
                if await process.stdout.read(1):
                    return
        except TimeoutError as error:
            raise ToolError(CRASH, f"error: the sandbox failed: {self.name} started no program within {seconds:g} s") from error
        said.seek(0)
        lines = [line.strip() for line in said.read(_CHUNK).decode(errors="replace").splitlines() if not line.startswith(_ADVICE)]
        last = next((line for line in reversed(lines) if line), "nothing")
        raise ToolError(CRASH, f"error: the sandbox failed: {self.name} says: {last[:300]}")

    async def _watch(self, process: asyncio.subprocess.Process) -> ProgramEnded:
        assert process.stdout is not None
        begin, output = time.monotonic(), bytearray()
        most = self._limits.output_bytes
        try:
            async with asyncio.timeout(self._limits.wall_s):
                while len(output) <= most and (chunk := await process.stdout.read(_CHUNK)):
                    output += chunk
                if len(output) > most:
                    return ProgramEnded(_text(output[:most]), flooded=True)
                status = await process.wait()
        except TimeoutError:
            return ProgramEnded(_text(output[:most]), timeout="wall")
        # As a shell does, the walls say 128 + n for signal n.
        status = 128 - status if status - 128 in signal.valid_signals() else status
        spent = status == -signal.SIGXCPU or (status == -signal.SIGKILL and time.monotonic() - begin > self._limits.cpu_s)
        return ProgramEnded(_text(output), status=status, timeout="cpu" if spent else None)

    async def _end(self, process: asyncio.subprocess.Process, name: str) -> None:
        assert process.stdout is not None
        killed = process.returncode is None
        if killed:
            with suppress(ProcessLookupError):
                process.kill()
            await self._wall.removed(name)
        try:
            async with asyncio.timeout(_END_S):
                while await process.stdout.read(_CHUNK):  # `wait` returns only at the end of the stream
                    pass
                await process.wait()
        except TimeoutError as error:
            raise WaitTimeout(f"a program in {self.name}", "end", _END_S) from error


def _text(output: bytes | bytearray) -> str:
    """Return the output; tracebacks name the program's file without its directory."""
    return output.decode(errors="replace").replace(f'File "{DIRECTORY}/', 'File "')
