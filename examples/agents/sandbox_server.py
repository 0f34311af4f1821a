"""A server for `environment.sandbox.url`, with bubblewrap behind it.

SANDBOX_TOKEN=secret python examples/agents/sandbox_server.py 8000

Run it on a machine of its own, as a user who may read no secret, behind a proxy that speaks TLS.
"""

from __future__ import annotations

import hmac
import os
import sys

import msgspec
from aiohttp import web

from asyncmoe.rollout.episodes.tools.sandbox import PythonLimits
from asyncmoe.rollout.episodes.tools.sandboxes import sandbox_of

MOST = PythonLimits(wall_s=60, cpu_s=30)
PROGRAMS = 8


class Limits(msgspec.Struct):
    """What a request may ask for; more than `MOST` is refused."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    file_bytes: int
    open_files: int
    output_bytes: int


class Request(msgspec.Struct):
    """See docs/guides/environment.md."""

    program: str
    limits: Limits


class Programs:
    """Runs at most `PROGRAMS` at once; a request beyond is told to come later."""

    def __init__(self, token: str) -> None:
        self._token, self._running = f"Bearer {token}".encode(), 0

    async def run(self, request: web.Request) -> web.Response:
        """Answer one request."""
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self._token):
            return web.Response(status=401, text="wrong token")
        try:
            asked = msgspec.json.decode(await request.read(), type=Request)
        except (msgspec.MsgspecError, RecursionError) as error:
            return web.Response(status=400, text=str(error))
        wanted = msgspec.structs.asdict(asked.limits)
        if any(not 0 < value <= getattr(MOST, name) for name, value in wanted.items()):
            return web.Response(status=400, text=f"limits above {MOST}")
        if self._running >= PROGRAMS:
            return web.Response(status=503, headers={"Retry-After": "1"})
        self._running += 1
        try:
            sandbox = sandbox_of(PythonLimits(**wanted))
            ended = await sandbox.run(asked.program.encode(errors="replace"))
        finally:
            self._running -= 1
        return web.json_response({"output": ended.output, "status": ended.status, "timeout": ended.timeout, "flooded": ended.flooded})


def application(token: str) -> web.Application:
    """Return the server. A program may be as large as `PythonLimits.code_bytes`, in JSON."""
    served = web.Application(client_max_size=MOST.code_bytes * 6 + 4096)
    served.add_routes([web.post("/run", Programs(token).run)])
    return served


if __name__ == "__main__":
    web.run_app(application(os.environ["SANDBOX_TOKEN"]), host="127.0.0.1", port=int(sys.argv[1]))
