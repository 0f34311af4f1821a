"""An all-gather of small values among the ranks, over a Unix socket of rank 0, with a limit: what gloo is to the real trainer."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from asyncmoe.errors import AsyncmoeError


class Collective:
    """Call it with a value on every rank; it returns everyone's. `timeout_s`: for this call; default: the one of all.

    Raises:
        AsyncmoeError: a rank took no part within the limit.
    """

    def __init__(self, folder: Path, rank: int, world: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        place = str(folder / f"ranks-{os.getppid()}")
        self._files: list[Any] = []
        self._sockets: list[socket.socket] = []
        if rank == 0:
            with suppress(FileNotFoundError):
                os.unlink(place)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(place)
                listener.listen()
                listener.settimeout(timeout_s)
                with self._bounded("no rank"):
                    self._files = [self._file(listener.accept()[0]) for _ in range(world - 1)]
            os.unlink(place)
        else:
            self._files = [self._file(self._connected(place))]

    def __call__(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        for connection in self._sockets:
            connection.settimeout(timeout_s or self._timeout_s)
        with self._bounded("a rank"):
            if self._rank == 0:
                found = [value, *(self._read(file) for file in self._files)]
                for file in self._files:
                    self._write(file, found)
                return found
            self._write(self._files[0], value)
            return list(self._read(self._files[0]))

    def _connected(self, place: str) -> socket.socket:
        until = time.monotonic() + self._timeout_s
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(place)
            except OSError as error:
                connection.close()
                if time.monotonic() > until:
                    raise AsyncmoeError(f"rank 0 took no part in a collective for {self._timeout_s:g} s") from error
                time.sleep(0.05)
            else:
                return connection

    def _file(self, connection: socket.socket) -> Any:
        connection.settimeout(self._timeout_s)
        self._sockets.append(connection)
        return connection.makefile("rw")

    def _write(self, file: Any, value: Any) -> None:
        file.write(json.dumps(value) + "\n")
        file.flush()

    def _read(self, file: Any) -> Any:
        if not (line := file.readline()):
            raise ConnectionError
        return json.loads(line)

    @contextmanager
    def _bounded(self, who: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise AsyncmoeError(f"{who} took no part in a collective for {self._timeout_s:g} s") from error
        except OSError as error:
            raise AsyncmoeError("a rank took no part in a collective: it is gone") from error
