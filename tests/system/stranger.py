"""Another user of the machine, who tries every port and file of a run: `python stranger.py`, as root, which becomes nobody.

Reads the targets as JSON from its input once it is ready, and prints its results: responses of sockets, operations that succeeded, and
all data it could read. What one user may do to processes of another is Linux's own; only their command lines are what a run chooses.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

NOBODY = 65534
PATIENCE_S = 1.0
BODY = b'{"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}'


def requests() -> Iterator[bytes]:
    """Messages sent to each port, each over its own connection."""
    for headers in (b"", b"Authorization: Bearer \r\n"):  # every path: tests/engine/test_access.py
        yield b"GET / HTTP/1.1\r\nHost: a\r\n" + headers + b"Connection: close\r\n\r\n"
    yield b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(BODY), BODY)
    yield b"OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    for mechanism in (b"NULL", b"PLAIN", b"CURVE"):
        ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"
        yield greeting + mechanism.ljust(20, b"\0") + bytes(32) + ready + b"\x01\x00\x00\x02hi"
    for number in range(64):  # gloo's: the number of a pair, then a preamble that says how many bytes follow
        yield struct.pack("=q", number) + bytes(64)
    yield bytes(range(256)) * 16
    yield b"\x80\x04\x95\x0b\x00\x00\x00"  # a pickle
    # torch's TCPStore: VALIDATE with its magic number, then GETNUMKEYS, and SET of "a" to "b"
    yield b"\x0a" + struct.pack("=I", 0x3C85F7CE) + b"\x07"
    yield b"\x0a" + struct.pack("=I", 0x3C85F7CE) + b"\x00" + struct.pack("=Q", 1) + b"a" + struct.pack("=Q", 1) + b"b"


def open_to_us(places: list[Any], family: socket.AddressFamily) -> list[Any]:
    """The places at which a connection comes about."""
    tries = [(place, socket.socket(family)) for place in places]
    for place, one in tries:
        one.setblocking(False)
        one.connect_ex(place)
    time.sleep(PATIENCE_S)
    found = []
    for place, one in tries:
        with one:
            if succeeds(one.getpeername):
                found.append(place)
    return found


def ask_all(places: list[Any], family: socket.AddressFamily) -> dict[str, list[str]]:
    """Send every message to every port; return each connection's response, or the reason for none."""
    asked = [(place, said) for place in places for said in requests()]
    with ThreadPoolExecutor(128) as threads:
        answers = list(threads.map(lambda one: answer(one[0], one[1], family), asked))
    return {repr(place): [told for (to, _), told in zip(asked, answers, strict=True) if to == place] for place in places}


def answer(place: Any, said: bytes, family: socket.AddressFamily) -> str:
    """Return the complete response of a connection, or the reason for none."""
    got = b""
    with socket.socket(family) as one:
        one.settimeout(PATIENCE_S)
        try:
            one.connect(place)
            one.sendall(said)
            while part := one.recv(1 << 16):
                got += part
        except OSError as error:  # a time-out too
            return got.decode("latin1") or f"! {error.strerror}"
    return got.decode("latin1")


def try_files(paths: list[str], read: dict[str, str]) -> list[str]:
    """The operations on files and folders that succeeded."""
    done = []
    for path in paths:
        attempts: dict[str, Callable[[], object]] = {
            "list": partial(os.listdir, path),
            "write": lambda path=path: os.close(os.open(path, os.O_WRONLY)),
            "create": lambda path=path: os.close(os.open(f"{path}/stranger", os.O_WRONLY | os.O_CREAT, 0o666)),
            "truncate": partial(os.truncate, path, 0),
            "rename": partial(os.rename, path, f"{path}.stranger"),
            "unlink": partial(os.unlink, path),
            "rmdir": partial(os.rmdir, path),
        }
        done += [f"{what} {path}" for what, attempt in attempts.items() if succeeds(attempt)]
        if (text := contents(path)) is not None:
            read[path] = text
    return done


def succeeds(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


def contents(path: str) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:
            os.set_blocking(file.fileno(), False)
            return (file.read(1 << 20) or b"").decode("latin1")
    except OSError:
        return None


def main() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.chdir("/")
    print("ready", flush=True)
    targets = json.loads(sys.stdin.readline())
    read: dict[str, str] = {}
    sockets = [name.replace("@", "\0", 1) if name.startswith("@") else name for name in targets["unix"]]
    opened = open_to_us([tuple(place) for place in targets["tcp"]], socket.AF_INET)
    result = {
        "opened": opened,
        "tcp": ask_all(opened, socket.AF_INET),
        "unix": ask_all(sockets, socket.AF_UNIX),
        "files": try_files(targets["files"], read),
        "commands": {pid: contents(f"/proc/{pid}/cmdline") for pid in targets["pids"]},
        "read": read,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
