"""Programs on a server of the user's own. docs/guides/environment.md has the protocol.

A program is posted again only if no program has begun (`Later`). A connection that breaks later is not tried again, because the program
may be running.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_before_delay, wait_random_exponential

from asyncmoe.config.sandbox import SandboxSection
from asyncmoe.errors import ConfigError, TrajectoryRejected
from asyncmoe.rollout.episodes.tools.sandbox import ProgramEnded, PythonLimits
from asyncmoe.rollout.episodes.tools.tool import CRASH, ToolError
from asyncmoe.rollout.scoring.http import Poster
from asyncmoe.rollout.scoring.types import Later

_GRACE_S = 10.0
"""Seconds of a request in addition to the program's own; as long is a program posted again."""
_ESCAPED = 6
"""Bytes that JSON may need for one byte of output: \\u0001."""
_REST_BYTES = 4096
_backoff = wait_random_exponential(multiplier=0.5, max=10.0)


class Answer(msgspec.Struct, frozen=True):
    """The server's answer; see `ProgramEnded`."""

    output: str
    status: int = 0
    timeout: Literal["wall", "cpu"] | None = None
    flooded: bool = False


class RemoteSandbox:
    """See `Sandbox`.

    Raises:
        ConfigError: the variable with the token is not set.
    """

    hint: str | None = None

    def __init__(self, limits: PythonLimits, section: SandboxSection) -> None:
        assert section.url is not None
        self._limits, self.name = limits, section.url
        token = "" if section.token_env is None else os.environ.get(section.token_env, "")
        if section.token_env is not None and not (token and token.isascii() and token.isprintable()):
            got = f"{section.token_env}, which is {'no header value' if token else 'not set'}"
            raise ConfigError("environment.sandbox.token_env", got=got, expected="a variable with a bearer token", hint="export it")
        self._seconds = limits.wall_s + _GRACE_S
        self._poster = Poster(section.url, self._seconds, token, reuse=False)
        self._told = limits.model_dump(exclude={"code_bytes"})

    async def run(self, program: bytes) -> ProgramEnded:
        """See `Sandbox`."""
        body = msgspec.json.encode({"program": program.decode(errors="replace"), "limits": self._told})
        most = self._limits.output_bytes * _ESCAPED + _REST_BYTES
        again = AsyncRetrying(retry=retry_if_exception_type(Later), wait=_pause, stop=stop_before_delay(self._seconds), reraise=True)
        try:
            answer = msgspec.json.decode(await again(self._poster.post, body, most), type=Answer)
        except TrajectoryRejected as rejected:
            raise ToolError(CRASH, f"error: the sandbox failed: {str(rejected).partition(': ')[2]}") from rejected
        except (ValueError, RecursionError) as error:
            raise ToolError(CRASH, f"error: the sandbox failed: {self.name}: an answer that is not of the protocol: {error}") from error
        output = answer.output.encode(errors="replace")
        cut = output[: self._limits.output_bytes].decode(errors="replace")
        if answer.flooded or len(output) > self._limits.output_bytes:
            return ProgramEnded(cut, flooded=True)
        return ProgramEnded(cut, status=answer.status, timeout=answer.timeout)

    async def close(self) -> None:
        """See `Sandbox`."""
        await self._poster.close()


def _pause(state: RetryCallState) -> float:
    """Return the seconds until the next request: as the server asks, else more from time to time."""
    later = state.outcome.exception() if state.outcome is not None else None
    return max(later.after_s if isinstance(later, Later) else 0.0, _backoff(state))
