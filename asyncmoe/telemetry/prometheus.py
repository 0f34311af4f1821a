"""Export records as Prometheus gauges over HTTP, and the run's health."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import secrets
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from asyncmoe.errors import ConfigError
from asyncmoe.storage import writing
from asyncmoe.telemetry.follow import Followed
from asyncmoe.telemetry.health import Health, answer
from asyncmoe.telemetry.metric import numbers
from asyncmoe.telemetry.schema import Resume, Step

KEY_FILE = "metrics.key"
"""File of the run directory with the key of `/metrics` and `/health`, if other machines can reach them."""
_TIMEOUT_S = 10.0
_MOST_CONNECTIONS = 16


class Prometheus:
    """Serves http://host:port/health, and http://host:port/metrics with `asyncmoe_step`, `asyncmoe_step_<field>`,
    `asyncmoe_rollout_<field>` and `asyncmoe_evaluation_<field>`.

    A mapping field is one gauge with a label (age, reason, engine); keys that a newer record lacks disappear.

    Args:
        port: 0: any free port; the attribute `port` has its number.
        host: address to listen on.
        key: that requests must have as "Authorization: Bearer KEY"; "" needs none, and is for loopback.
        health: judges the run; None: there is no /health.

    Raises:
        ConfigError: the port is not available.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", key: str = "", health: Callable[[], Health] | None = None) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server = _Server((host, port), self._registry, key, health)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                got, expected = f"{host} ({error.strerror})", "an address of this machine, or 0.0.0.0 for all"
                raise ConfigError("telemetry.prometheus_host", got=got, expected=expected) from error
            raise ConfigError("telemetry.prometheus_port", got=f"{port} ({error.strerror})", expected="a free port") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port = self._server.server_port

    def feed(self, records: list[Followed]) -> None:
        for record in records:
            if isinstance(record, Resume):
                self._gauge("asyncmoe_step", "Steps taken.").set(record.resumed_at)
                continue
            source = type(record).__name__.lower()
            if isinstance(record, Step):
                self._gauge("asyncmoe_step", "Steps taken.").set(record.step)
            cleared: set[str] = set()
            for name, label, key, value, help in numbers(record):
                gauge = self._gauge(f"asyncmoe_{source}_{name}", help, label)
                if key is None:
                    gauge.set(value)
                    continue
                if name not in cleared:
                    gauge.clear()
                    cleared.add(name)
                gauge.labels(key).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str, help: str, label: str | None = None) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, help, () if label is None else (label,), registry=self._registry)
        return self._gauges[name]


class _Server(ThreadingHTTPServer):
    """Answers GET of /metrics and /health; a connection beyond the bound is closed at once."""

    daemon_threads = True

    def __init__(self, at: tuple[str, int], registry: CollectorRegistry, key: str, health: Callable[[], Health] | None) -> None:
        self.registry, self.key, self.health = registry, key, health
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in at[0] else socket.AF_INET
        super().__init__(at, _Handler)

    def process_request(self, request: object, client_address: object) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Leave a connection that failed: the client asks again."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT_S
    server_version, sys_version = "asyncmoe", ""

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if self.server.key and not hmac.compare_digest(given, f"Bearer {self.server.key}".encode()):
            self._answer(401, b"this server needs the key of the run\n", "text/plain")
        elif self.path.partition("?")[0] == "/metrics":
            # https://prometheus.io/docs/instrumenting/exposition_formats
            self._answer(200, generate_latest(self.server.registry), CONTENT_TYPE_LATEST)
        elif self.path.partition("?")[0] == "/health" and self.server.health is not None:
            self._answer(*answer(self.server.health()))
        else:
            self._answer(404, b"not here: /metrics or /health\n", "text/plain")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape every few seconds is no news."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def key_for(host: str, run_dir: Path) -> str:
    """Return the key that requests to `host` need, "" on loopback. The run keeps its key, so that a scraper may be told of it once.

    Raises:
        StorageError: the key's file cannot be written.
    """
    if is_loopback(host):
        return ""
    path = run_dir / KEY_FILE
    with writing("key of /metrics", path):
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32))
        except FileExistsError:
            path.chmod(0o600)
    return path.read_text().strip()
