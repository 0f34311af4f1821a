"""What nothing can beat here: a copy in memory, and bytes through a loopback TCP connection to another process that drops them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import numpy as np

_TIMEOUT_S = 120.0
_READER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 60) as stream:
    into, left = bytearray(1 << 20), int(sys.argv[2])
    while left:
        left -= stream.recv_into(into, min(left, len(into))) or sys.exit("the writer is gone")
    stream.sendall(b"x")
"""


def run(size: int, count: int) -> dict[str, float]:
    """`count` pieces of `size` bytes; GB for a second of wall time, one thread, one connection."""
    piece = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    pieces = [piece.copy() for _ in range(min(count, 32))]
    into = np.empty_like(piece)
    begin = time.monotonic()
    for i in range(count):
        np.copyto(into, pieces[i % len(pieces)])
    copied = time.monotonic() - begin
    streamed = _stream(pieces, count)
    return {"memcpy_GBps": round(size * count / copied / 1e9, 3), "tcp_GBps": round(size * count / streamed / 1e9, 3)}


def _stream(pieces: list[np.ndarray], count: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_TIMEOUT_S)
        total = pieces[0].nbytes * count
        reader = subprocess.Popen([sys.executable, "-c", _READER, str(server.getsockname()[1]), str(total)])
        try:
            stream, _ = server.accept()
            with stream:
                stream.settimeout(_TIMEOUT_S)
                begin = time.monotonic()
                for i in range(count):
                    stream.sendall(pieces[i % len(pieces)].data)
                stream.recv(1)
                return time.monotonic() - begin
        finally:
            reader.kill()
            reader.wait()
