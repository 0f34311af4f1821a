"""Makes a server require its key in every request.

SGLang's own check lets health checks, metrics, OPTIONS and web sockets pass without a key (`decide_request_auth` and
`_ApiKeyASGIMiddleware`, sglang/srt/utils/auth.py 0.5.23). A health check can generate, and any user of the machine can reach loopback.
An engine's nodes after the first would serve only health checks, without a key; here they open no port.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from asyncmoe.platform.sglang.patching import PatchTargetGone

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_BODY = b'{"error": {"message": "Unauthorized"}}'
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]


class KeyRequired:
    """ASGI middleware that returns 401 to any request without the header `Authorization: Bearer KEY`.

    Args:
        app: the application behind it.
        key: the key; compared in constant time.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], key: str) -> None:
        self._app, self._expected = app, b"bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "lifespan" or self._admitted(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            # Closing a socket before accepting it makes a server return status 403.
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": _BODY})

    def _admitted(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return hmac.compare_digest(scheme.lower() + b" " + key, self._expected)


def _mend_log(engine: Any) -> None:
    """Keep the key out of the log."""
    original = engine._server_args_for_logging
    engine._server_args_for_logging = lambda arguments: {**original(arguments), "api_key": None}


def _mend_nodes(common: Any) -> None:
    """Disable servers on an engine's later nodes."""
    if not callable(getattr(common, "launch_dummy_health_check_server", None)):
        raise PatchTargetGone(f"{common.__name__}.launch_dummy_health_check_server is gone")
    common.launch_dummy_health_check_server = lambda *_: None


def _mend(auth: Any) -> None:
    """Add the middleware wherever SGLang adds its own, that is, if the server has a key."""
    original = auth.add_api_key_middleware

    def both(app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
        original(app, api_key=api_key, admin_api_key=admin_api_key)
        if api_key is not None:
            app.add_middleware(KeyRequired, key=api_key)

    auth.add_api_key_middleware = both


PATCHES = {
    "sglang.srt.utils.auth": _mend,
    "sglang.srt.utils.common": _mend_nodes,
    "sglang.srt.entrypoints.engine": _mend_log,
}
