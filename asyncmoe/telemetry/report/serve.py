"""`asyncmoe report --serve`: the page of running runs, on loopback.

Other users of this machine can connect to the port too, and samples are the owner's: every address begins with a random token. A page of
another origin that a browser shows cannot read answers, and one whose name resolves to loopback (DNS rebinding) sends its own name in the
Host header, which is refused.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socketserver
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

from asyncmoe.errors import DataError, UserError
from asyncmoe.telemetry.report.command import check
from asyncmoe.telemetry.report.page import html
from asyncmoe.telemetry.report.run_page import names
from asyncmoe.telemetry.report.watched import WatchedRuns

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
"""Names under which a browser may ask; any port, so that a tunnel may end at another one."""
_TIMEOUT_S = 15.0
_MOST_CONNECTIONS = 32
_GROUP = re.compile(r"group/(\d{1,3})/(\d{1,9})")


class ReportServer(socketserver.ThreadingTCPServer):
    """Serves the page of runs. Call `serve_forever`; `address` is what a browser opens.

    Args:
        port: 0: any free one.

    Raises:
        UserError: the port cannot be used, a run directory does not exist, or plotly is not installed.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = _MOST_CONNECTIONS

    def __init__(self, run_dirs: Sequence[Path], port: int = 0, *, samples: bool = True) -> None:
        check(run_dirs)
        self.token = secrets.token_urlsafe(24)
        self.watched = WatchedRuns(run_dirs, samples)
        self.page = html(", ".join(names(run_dirs)), None, {}).encode()
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UserError("asyncmoe report --port", got=f"{port}: {why}", expected="a free port", hint="omit it, to get one") from error

    @property
    def address(self) -> str:
        """What a browser opens; keep it to yourself."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: object, client_address: object) -> None:
        """Start a thread for a connection; close it at once if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        """Answer a connection."""
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Leave a connection that its browser closed; another error is a bug, and is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of the page, of its data, and of a group."""

    server: ReportServer
    timeout = _TIMEOUT_S
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "asyncmoe", ""

    def do_GET(self) -> None:
        if not _is_own_name(self.headers.get_all("Host") or []):
            self._answer(HTTPStatus.FORBIDDEN, b"this server answers to 127.0.0.1 and localhost only\n", "text/plain")
            return
        token, _, rest = urlsplit(self.path).path.lstrip("/").partition("/")
        if not hmac.compare_digest(token.encode("latin-1", "replace"), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, b"the address needs the token that asyncmoe report --serve printed\n", "text/plain")
            return
        if rest == "":
            self._answer(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif rest == "data.json":
            self._data()
        elif found := _GROUP.fullmatch(rest):
            self._group(int(found[1]), int(found[2]))
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not here\n", "text/plain")

    def _data(self) -> None:
        data = self.server.watched.data()
        if self.headers.get("If-None-Match") == f'"{data.tag}"':
            self._answer(HTTPStatus.NOT_MODIFIED, b"", None, {"ETag": f'"{data.tag}"'})
        else:
            self._answer(HTTPStatus.OK, data.body, "application/json", {"ETag": f'"{data.tag}"', "Content-Encoding": "gzip"})

    def _group(self, run: int, place: int) -> None:
        try:
            body = self.server.watched.group(run, place)
        except DataError as error:
            self._answer(HTTPStatus.GONE, str(error).encode(errors="replace"), "text/plain; charset=utf-8")
            return
        if body is None:
            self._answer(HTTPStatus.NOT_FOUND, b"no such group\n", "text/plain")
        else:
            self._answer(HTTPStatus.OK, body, "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str | None, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **({} if kind is None else {"Content-Type": kind}),
            **(more or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: addresses hold the token."""


def _is_own_name(hosts: Sequence[str]) -> bool:
    """Whether a request's Host headers name loopback."""
    if len(hosts) != 1:
        return False
    name, colon, port = hosts[0].partition(":")
    return name.lower() in _NAMES and (port.isascii() and port.isdigit() if colon else True)


def serve(run_dirs: Sequence[Path], port: int, *, samples: bool = True) -> None:
    """Serve the page until Ctrl-C. Prints its address.

    Raises:
        UserError: see `ReportServer`.
    """
    with ReportServer(run_dirs, port, samples=samples) as server:
        print(server.address, flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return
