"""A real Redis server in a temporary folder, which can be killed and started again."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SAFE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""What log.redis needs."""
_UP_S = 20.0


def needed() -> pytest.MarkDecorator:
    """Skip tests where there is no server or no client."""
    parts = {"redis-server": shutil.which("redis-server"), "the package redis": find_spec("redis")}
    absent = [what for what, there in parts.items() if not there]
    return pytest.mark.skipif(bool(absent), reason=f"without {' and '.join(absent)}")


class LocalRedis:
    """A server on a Unix socket in a folder.

    Attributes:
        url: of its database 0.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str] = SAFE) -> None:
        self._folder, self._settings = folder, dict(settings)
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        folder.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        """Start the server on what its folder holds; return once it answers."""
        settings = {"port": "0", "unixsocket": str(self.socket), "dir": str(self._folder), "save": "", "databases": "512", **self._settings}
        command = ["redis-server", *(part for name, value in settings.items() for part in (f"--{name}", value))]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until = time.monotonic() + _UP_S
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except Exception as error:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise AssertionError(f"redis-server did not start: {error}\n{(self._folder / 'log').read_text()[-1000:]}") from error
                time.sleep(0.01)

    def client(self, database: int = 0, **options: Any) -> Any:
        """A client of the server."""
        import redis

        return redis.Redis(unix_socket_path=str(self.socket), db=database, protocol=2, **options)

    @property
    def is_running(self) -> bool:
        """Whether the server runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._process.pid

    def configure(self, **settings: str) -> None:
        """CONFIG SET, with - for _."""
        with self.client() as client:
            for name, value in settings.items():
                client.config_set(name.replace("_", "-"), value)

    def kill(self) -> None:
        """SIGKILL, unless the server has ended."""
        if self.is_running:
            self.signal(signal.SIGKILL)
            self._process.wait(10)

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        os.kill(self._process.pid, number)

    def close(self) -> None:
        """End the server."""
        self.kill()


class LossyLink:
    """A socket in front of a server that closes connections between a request and its answer.

    Args:
        share: of the answers that are lost.
    """

    def __init__(self, server: LocalRedis, folder: Path, share: float, seed: int) -> None:
        self.socket, self.lost = folder / "link.sock", 0
        self._server, self._share, self._draw = server, share, random.Random(seed)
        link = self

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):
                    link.carry(self.request)

        self._listener = socketserver.ThreadingUnixStreamServer(str(self.socket), Connection)
        self._listener.daemon_threads = True
        threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True).start()

    def carry(self, client: socket.socket) -> None:
        """Carry requests and answers until one is lost or an end closes."""
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(str(self._server.socket))
            while True:
                ready, _, _ = select.select([client, server], [], [])
                for end in ready:
                    if not (data := end.recv(1 << 16)):
                        return
                    if end is server and self._draw.random() < self._share:
                        self.lost += 1
                        return
                    (server if end is client else client).sendall(data)

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.shutdown()
        self._listener.server_close()
