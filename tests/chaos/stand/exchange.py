"""How versions travel from the ranks to the engines here, in place of stores and transports: over a connection of each receiver to rank 0.

Rank 0 says which version follows, and sends the part of every rank in pieces, in which time a fault may come; the receiver says what it has
staged.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from asyncmoe.platform.sglang.receiver_command import JoinCommand
from tests.chaos.stand import weights

PART_BYTES = 25 * 600
_PIECE_BYTES = PART_BYTES // 10
_PIECE_S = 0.005
_CONNECT_S = 5.0


@dataclass(frozen=True)
class Staged:
    """A version that waits for its commit."""

    update: int
    version: int
    parts: tuple[str, ...]


class Receiver:
    """Stages versions in a thread. `staged`: the newest that is whole."""

    def __init__(self, join: JoinCommand, say: Callable[..., None]) -> None:
        self.staged: Staged | None = None
        self._say, self._socket = say, socket.create_connection((join.host, join.port), _CONNECT_S)
        self._socket.settimeout(None)
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with suppress(OSError, ValueError), self._socket, self._socket.makefile("rb") as file:
            for line in file:
                told = json.loads(line)
                self._say("staging", version=told["version"])
                parts = tuple(weights.unpacked(file.read(PART_BYTES), PART_BYTES) for _ in range(told["parts"]))
                self.staged = Staged(told["update"], told["version"], parts)
                self._say("staged", version=told["version"])
                self._socket.sendall(json.dumps({"staged": told["update"]}).encode() + b"\n")


class Meeting:
    """Rank 0's connections to the receivers of one roster. `port`: where they connect."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._connections: list[Any] = []

    def wait(self, receivers: int, timeout_s: float) -> None:
        """Wait until this many have connected. Raises TimeoutError."""
        until = time.monotonic() + timeout_s
        while len(self._connections) < receivers:
            self._listener.settimeout(max(0.01, until - time.monotonic()))
            connection, _ = self._listener.accept()
            connection.settimeout(timeout_s)
            self._connections.append((connection, connection.makefile("rb")))

    def send(self, update: int, version: int, parts: list[str]) -> None:
        """Make every receiver stage a version. Raises ValueError, naming one that does not."""
        order = json.dumps({"update": update, "version": version, "parts": len(parts)}).encode() + b"\n"
        data = b"".join(weights.packed(part, PART_BYTES) for part in parts)
        for piece in (order, *(data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES))):
            for connection, _ in self._connections:
                with suppress(OSError):  # its silence says it
                    connection.sendall(piece)
            time.sleep(_PIECE_S)
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
