"""Programs of the tool "python" on a server of the user's own. docs/guides/environment.md has the protocol.

A program is posted again only if it has not begun (`Later`): after a connection breaks off, the program may be running.
"""

from __future__ import annotations

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_before_delay, wait_random_exponential

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.episodes.tools.sandbox import Ended, PythonLimits
from asyncmoe.rollout.episodes.tools.tool import CRASH, ToolError, variable
from asyncmoe.rollout.scoring.http import Poster
from asyncmoe.rollout.scoring.types import Later

_GRACE_S = 10.0
"""Seconds of a request in addition to the program's own; the sum also limits the retries."""
_ESCAPED = 6
"""Bytes that JSON may need for one byte of output: \\u0001."""
_REST_BYTES = 4096
_TOLD = {"wall_s", "cpu_s", "memory_bytes", "file_bytes", "open_files", "output_bytes"}
_backoff = wait_random_exponential(multiplier=0.5, max=10.0)


class SandboxServer:
    """Runs programs under `PythonLimits`, which it passes on.

    Raises:
        ConfigError: the variable with the token is not set.
    """

    hint = "start the server, or correct environment.sandbox.url and environment.sandbox.token_env"

    def __init__(self, limits: PythonLimits, url: str, token_env: str | None) -> None:
        self._limits, self._url = limits, url
        self._token = "" if token_env is None else variable("environment.sandbox.token_env", token_env)

    async def run(self, program: bytes) -> Ended:
        """Run a program. Raises ToolError: `CRASH`: the server failed."""
        most, seconds = self._limits.output_bytes, self._limits.wall_s + _GRACE_S
        body = msgspec.json.encode({"program": program.decode(), "limits": self._limits.model_dump(include=_TOLD)})
        again = AsyncRetrying(retry=retry_if_exception_type(Later), wait=_pause, stop=stop_before_delay(seconds), reraise=True)
        poster = Poster(self._url, seconds, self._token)
        try:
            return msgspec.json.decode(await again(poster.post, body, most * _ESCAPED + _REST_BYTES), type=Ended)
        except TrajectoryRejected as rejected:
            raise ToolError(CRASH, f"error: {str(rejected).partition(': ')[2]}") from rejected
        except (ValueError, RecursionError) as error:
            raise ToolError(CRASH, f"error: {self._url}: an answer that is not of the protocol: {error}") from error
        finally:
            await poster.close()


def _pause(state: RetryCallState) -> float:
    """Return the seconds until the next request: exponential backoff, but at least as long as the server asks."""
    later = state.outcome.exception() if state.outcome is not None else None
    return max(later.after_s if isinstance(later, Later) else 0.0, _backoff(state))
