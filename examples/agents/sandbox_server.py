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
from pydantic import BaseModel

from asyncmoe.rollout.episodes.tools.sandbox import Bubblewrap, PythonLimits

MOST = PythonLimits(wall_s=60, cpu_s=30)
PROGRAMS = 8


class Request(BaseModel):
    """See docs/guides/environment.md."""

    program: str
    limits: PythonLimits


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
            asked = Request.model_validate_json(await request.read())
        except ValueError as error:
            return web.Response(status=400, text=str(error))
        if any(value > getattr(MOST, name) for name, value in asked.limits.model_dump().items()):
            return web.Response(status=400, text=f"limits above {MOST}")
        if self._running >= PROGRAMS:
            return web.Response(status=503, headers={"Retry-After": "1"})
        self._running += 1
        try:
            ended = await Bubblewrap(asked.limits).run(asked.program.encode(errors="replace"))
        finally:
            self._running -= 1
        return web.Response(body=msgspec.json.encode(ended), content_type="application/json")


def application(token: str) -> web.Application:
    """Return the server. A program may be as large as `PythonLimits.code_bytes`, in JSON."""
    served = web.Application(client_max_size=MOST.code_bytes * 6 + 4096)
    served.add_routes([web.post("/run", Programs(token).run)])
    return served


if __name__ == "__main__":
    web.run_app(application(os.environ["SANDBOX_TOKEN"]), host="127.0.0.1", port=int(sys.argv[1]))
