"""An MCP server's process: lines in, lines out, both bounded; ended together with every process that it started.

The SDK's own `stdio_client` keeps a line of any length, and leaves processes that left their session.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from asyncmoe.rollout import reaped
from asyncmoe.rollout.episodes.tools.tool import FLOOD

MAX_BYTES = 4 * 2**20
"""Bytes that a server may write between two messages to it."""
_CHUNK = 65536
_SAID_BYTES = 2000
_SHOWN = 300
_LEAVE_S = 2.0
"""Seconds in which a server may end by itself after the end of its input, as the protocol asks it to."""
_SETTLE_S = 0.5


class ServerProcess:
    """One server. `open`, then `send` and `lines`, then `close`.

    Args:
        name: the server's name, for messages.
        command: program and arguments.
        environment: all variables of the program.
        directory: its working directory; None: this process's.

    Attributes:
        fault: reason and detail of a flood (`ToolError`), after which the server is no longer read; None: there was none.
        rubbish: the number of its lines that were no message.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], directory: Path | None = None) -> None:
        self.name = name
        self.fault: tuple[str, str] | None = None
        self.rubbish = 0
        self._command, self._environment, self._directory = tuple(command), dict(environment), directory
        self._process: asyncio.subprocess.Process | None = None
        self._first_rubbish = ""
        self._said: deque[bytes] = deque()
        self._since_sent = 0
        self._listening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the process. Raises OSError if the system can start none."""
        pipe = asyncio.subprocess.PIPE
        self._process = await reaped.start(self._command, _CHUNK, 0, stderr=pipe, env=self._environment, cwd=self._directory)
        self._listening = asyncio.create_task(self._listen())

    async def send(self, line: bytes) -> None:
        """Write one line. Raises ConnectionError if the server's input is closed."""
        process = self._opened()
        assert process.stdin is not None
        self._since_sent = 0
        process.stdin.write(line + b"\n")
        await process.stdin.drain()

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of its output, without empty ones, until it ends or floods."""
        process = self._opened()
        assert process.stdout is not None
        kept = bytearray()
        while chunk := await process.stdout.read(_CHUNK):
            self._since_sent += len(chunk)
            if self._since_sent > MAX_BYTES:
                self.fault = FLOOD, f"wrote more than {MAX_BYTES} bytes for one request"
                return
            searched = len(kept)
            kept += chunk
            if kept.find(b"\n", searched) < 0:
                continue
            *whole, rest = kept.split(b"\n")
            kept = bytearray(rest)
            for line in whole:
                if line.strip():
                    yield bytes(line)

    def note_rubbish(self, line: bytes) -> None:
        """Note a line that is no message, for what is said if the server fails."""
        self.rubbish += 1
        self._first_rubbish = self._first_rubbish or line[:_SHOWN].decode(errors="replace").strip()[:80]

    def state(self) -> str:
        """Describe what became of the server, for an error."""
        process = self._opened()
        parts = []
        if process.returncode is not None:
            parts.append(f"ended with {_status(process.returncode)}")
        if self.rubbish:
            parts.append(f"wrote {self.rubbish} line(s) that are no JSON-RPC, the first: {self._first_rubbish!r}")
        said = b"".join(self._said).decode(errors="replace").strip().splitlines()
        if said:
            parts.append(f"said: {said[-1].strip()[:_SHOWN]}")
        return "; ".join(parts)

    async def settled(self) -> None:
        """Wait a moment for the end of a process whose output has ended, so that `state` knows its status and its last words."""
        process = self._opened()
        if self.fault is None and process.stdout is not None and process.stdout.at_eof():
            with suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await process.wait()
                    if self._listening is not None:  # ends with the stream, which what the server started may keep open
                        await asyncio.wait([self._listening])

    async def close(self) -> None:
        """End the process and all that it started.

        Raises:
            WaitTimeout: the processes could not be killed.
        """
        if self._process is None:
            return
        process = self._process
        assert process.stdin is not None
        process.stdin.close()
        draining = asyncio.create_task(_drained(process.stdout))
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _LEAVE_S)
            await reaped.end(process, f"the MCP server {self.name}")
        finally:
            for task in (draining, self._listening):
                assert task is not None
                task.cancel()
            await asyncio.gather(*(task for task in (draining, self._listening) if task is not None), return_exceptions=True)

    async def _listen(self) -> None:
        """Keep the end of what the server says on standard error."""
        process = self._opened()
        assert process.stderr is not None
        size = 0
        while chunk := await process.stderr.read(_CHUNK):
            self._said.append(chunk[-_SAID_BYTES:])
            size += len(self._said[-1])
            while size - len(self._said[0]) >= _SAID_BYTES:
                size -= len(self._said.popleft())

    def _opened(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "the server was not opened"
        return self._process


async def _drained(stream: asyncio.StreamReader | None) -> None:
    """Discard the rest of a stream: `wait` returns only at the end of the streams, and a full one never ends."""
    assert stream is not None
    while await stream.read(_CHUNK):
        pass


def _status(code: int) -> str:
    number = code - 128 if code > 128 else -code
    if 0 < number < 65 and (code > 128 or code < 0):
        return signal.Signals(number).name if number in signal.valid_signals() and number in set(signal.Signals) else f"signal {number}"
    return f"status {code}"
