"""How versions travel from the ranks to the engines here, in place of stores and transports: lines of JSON and bytes over TCP.

A receiver connects to rank 0 and says its rank. For each version rank 0 names the ports of all ranks; the receiver fetches every part, in
which time a fault may come, and says what it has staged.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from asyncmoe.platform.sglang.receiver_command import JoinCommand
from tests.chaos.stand import weights

PART_BYTES = 25 * 600
_PIECES = 10
_PIECE_S = 0.005
_FETCH_S = 5.0


@dataclass(frozen=True)
class Staged:
    """A version that waits for its commit."""

    update: int
    version: int
    parts: tuple[str, ...]


class Receiver:
    """Fetches versions in a thread. `staged`: the newest that is whole."""

    def __init__(self, join: JoinCommand, say: Callable[..., None]) -> None:
        self.staged: Staged | None = None
        self._say, self._socket = say, socket.create_connection((join.host, join.port), _FETCH_S)
        self._socket.settimeout(None)
        self._socket.sendall(json.dumps({"rank": join.rank, "group": join.group}).encode() + b"\n")
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with suppress(OSError, ValueError), self._socket, self._socket.makefile("rb") as lines:
            for line in lines:
                asked = json.loads(line)
                self._say("staging", version=asked["version"])
                parts = tuple(weights.unpacked(_fetched(asked["host"], port, asked["version"])) for port in asked["ports"])
                self.staged = Staged(asked["update"], asked["version"], parts)
                self._say("staged", version=asked["version"])
                self._socket.sendall(json.dumps({"staged": asked["update"]}).encode() + b"\n")


def _fetched(host: str, port: int, version: int) -> bytes:
    with socket.create_connection((host, port), _FETCH_S) as connection, connection.makefile("rb") as file:
        connection.sendall(json.dumps({"version": version}).encode() + b"\n")
        data = file.read(PART_BYTES)
        if len(data) != PART_BYTES:
            raise ValueError(f"{len(data)} bytes of a part")
        return data


class PartServer:
    """Serves a rank's part of the newest versions to receivers. `port`: where."""

    def __init__(self) -> None:
        parts: dict[int, str] = {}
        self._parts = parts

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError, KeyError):
                    data = weights.packed(parts[json.loads(self.rfile.readline())["version"]], PART_BYTES)
                    for at in range(0, PART_BYTES, PART_BYTES // _PIECES):
                        self.wfile.write(data[at : at + PART_BYTES // _PIECES])
                        time.sleep(_PIECE_S)

        self._server = _Threaded(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def offer(self, version: int, part: str) -> None:
        """Serve a part as that of `version`."""
        self._parts[version] = part
        for old in [one for one in self._parts if one < version - 2]:
            del self._parts[old]


class _Threaded(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


class Meeting:
    """Rank 0's connections to the receivers of one roster. `port`: where they connect."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._connections: list[Any] = []

    def wait(self, receivers: int, timeout_s: float) -> None:
        """Return when so many have connected; TimeoutError if they do not."""
        until = time.monotonic() + timeout_s
        while len(self._connections) < receivers:
            self._listener.settimeout(max(0.01, until - time.monotonic()))
            connection, _ = self._listener.accept()
            connection.settimeout(timeout_s)
            file = connection.makefile("rb")
            file.readline()
            self._connections.append((connection, file))

    def send(self, update: int, version: int, ports: list[int]) -> None:
        """Have every receiver stage a version; ValueError names one that does not."""
        order = json.dumps({"update": update, "version": version, "ports": ports, "host": "127.0.0.1"}).encode() + b"\n"
        for connection, _ in self._connections:
            with suppress(OSError):  # its silence says it
                connection.sendall(order)
        for number, (_, file) in enumerate(self._connections):
            try:
                staged = json.loads(file.readline() or b"{}").get("staged") == update
            except OSError as error:
                raise ValueError(f"receiver {number} has not staged version {version}: {error}") from error
            if not staged:
                raise ValueError(f"receiver {number} is gone")

    def close(self) -> None:
        for connection, file in self._connections:
            with suppress(OSError):
                file.close()
                connection.close()
        self._listener.close()
