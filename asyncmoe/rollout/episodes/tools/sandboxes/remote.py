"""The sandbox `http`: programs run on a server of the user's own. docs/guides/environment.md has the protocol.

A program is posted again only if no program has begun: without a connection, or with status 429 or 503, by which a server says so. A
connection that breaks later is not tried again, because the program may be running.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import msgspec

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools.sandbox import ProgramEnded, PythonLimits
from asyncmoe.rollout.episodes.tools.tool import CRASH, ToolError
from asyncmoe.rollout.scoring.http import bounded_body
from asyncmoe.surroundings import proxy_for

_GRACE_S = 10.0
"""Seconds of a request in addition to the program's own."""
_ESCAPED = 6
"""Bytes that JSON may need for one byte of output: \\u0001."""
_REST_BYTES = 4096
_LATER = (429, 503)
_PAUSE_S, _MOST_PAUSE_S = 0.5, 10.0
_SHOWN = 200


class Answer(msgspec.Struct, frozen=True):
    """The server's answer; see `Ended`."""

    output: str
    status: int = 0
    timeout: str | None = None
    flooded: bool = False


class _Later(Exception):
    """No program has begun.

    Args:
        pause_s: seconds after which the server asks for another attempt, or None.
    """

    def __init__(self, why: str, pause_s: float | None = None) -> None:
        self.why, self.pause_s = why, pause_s
        super().__init__(why)


class RemoteSandbox:
    """See `Sandbox`.

    Raises:
        ConfigError: the variable with the token is not set.
    """

    def __init__(self, limits: PythonLimits, section: SandboxSection) -> None:
        assert section.url is not None
        self._limits, self._url, self._retries = limits, section.url, section.retries
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if section.token_env is not None:
            token = os.environ.get(section.token_env, "")
            if not token or not token.isascii() or not token.isprintable():
                got = f"{section.token_env}, which is {'not set' if not token else 'no header value'}"
                raise ConfigError("environment.sandbox.token_env", got=got, expected="a variable with a bearer token", hint="export it")
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None

    async def run(self, program: bytes) -> ProgramEnded:
        """See `Sandbox`."""
        body = msgspec.json.encode({"program": program.decode(errors="replace"), "limits": _told(self._limits)})
        for attempt in range(self._retries + 1):
            try:
                return await self._posted(body)
            except _Later as later:
                if attempt == self._retries:
                    raise ToolError(CRASH, f"error: the sandbox {self._url}: {later.why}") from later
                pause_s = _PAUSE_S * 2**attempt if later.pause_s is None else later.pause_s
                await asyncio.sleep(min(pause_s, _MOST_PAUSE_S))
        raise AssertionError("the last attempt returns or raises")

    def probe(self) -> None:
        """See `Sandbox`."""

        async def first() -> ProgramEnded:
            try:
                return await self.run(b"print('ready')")
            finally:
                await self.close()

        with ThreadPoolExecutor(1) as thread:
            try:
                ended = thread.submit(asyncio.run, first()).result()
            except ToolError as error:
                got = error.detail.removeprefix(f"error: the sandbox {self._url}: ")
                raise ConfigError("environment.sandbox.url", got=f"{self._url}: {got}", expected="a server that runs a program") from error
        if (ended.output, ended.status, ended.timeout) != ("ready\n"[: self._limits.output_bytes], 0, None):
            raise ConfigError("environment.sandbox.url", got=f"{ended} of print('ready')", expected="the output 'ready\\n' and status 0")

    async def close(self) -> None:
        """See `Sandbox`."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _posted(self, body: bytes) -> ProgramEnded:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, proxy=proxy_for(self._url))
        seconds = self._limits.wall_s + _GRACE_S
        most = self._limits.output_bytes * _ESCAPED + _REST_BYTES
        try:
            timeout = aiohttp.ClientTimeout(seconds)
            async with self._session.post(self._url, data=body, headers=self._headers, timeout=timeout, allow_redirects=False) as reply:
                text = await bounded_body(reply.content, most)
        except TimeoutError as error:
            raise ToolError(CRASH, f"error: the sandbox {self._url}: no answer within {seconds:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise _Later(str(error)) from error
        except aiohttp.ClientError as error:
            raise ToolError(CRASH, f"error: the sandbox {self._url}: {error or type(error).__name__}") from error
        if reply.status in _LATER:
            raise _Later(f"status {reply.status}", _seconds(reply.headers.get("Retry-After")))
        return self._read(reply.status, text, most)

    def _read(self, status: int, text: bytes, most: int) -> ProgramEnded:
        if status != 200:
            shown = " ".join(text[:_SHOWN].decode(errors="replace").split())
            raise ToolError(CRASH, f"error: the sandbox {self._url}: status {status}{f': {shown}' if shown else ''}")
        if len(text) > most:
            raise ToolError(CRASH, f"error: the sandbox {self._url}: an answer of more than {most} bytes")
        try:
            answer = msgspec.json.decode(text, type=Answer)
        except (ValueError, RecursionError) as error:
            raise ToolError(CRASH, f"error: the sandbox {self._url}: an answer that is not of the protocol: {error}") from error
        output = answer.output.encode(errors="replace")
        cut = output[: self._limits.output_bytes].decode(errors="replace")
        if answer.flooded or len(output) > self._limits.output_bytes:
            return ProgramEnded(cut, flooded=True)
        match answer.timeout:
            case None:
                return ProgramEnded(cut, status=answer.status)
            case "wall":
                return ProgramEnded(cut, status=answer.status, timeout="wall")
            case "cpu":
                return ProgramEnded(cut, status=answer.status, timeout="cpu")
        raise ToolError(CRASH, f"error: the sandbox {self._url}: got timeout {answer.timeout[:_SHOWN]!r}, expected wall, cpu or null")


def _told(limits: PythonLimits) -> dict[str, float]:
    """Return the limits that a server must apply."""
    names = ("wall_s", "cpu_s", "memory_bytes", "file_bytes", "open_files", "output_bytes")
    return {name: getattr(limits, name) for name in names}


def _seconds(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None for none, and for a date."""
    return float(value) if value is not None and value.isdecimal() and len(value) < 6 else None
