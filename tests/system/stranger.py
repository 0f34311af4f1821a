"""Another user of the machine, who tries every port, file and process of a run: `python stranger.py`, as root, which becomes nobody.

Reads the targets as JSON from its input once it is ready, and prints what it got: answers of sockets, operations that succeeded, and all
it could read.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

NOBODY = 65534
PATIENCE_S = 1.0
ANSWERS_S = 20.0
POSTED = {
    "/pause_generation": {"mode": "abort"},
    "/update_weights_from_disk": {"model_path": "/tmp"},
    "/generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}},
    "/flush_cache": {},
    "/abort_request": {"rid": ""},
}
READ = ("/health", "/health_generate", "/metrics", "/get_server_info", "/get_model_info", "/openapi.json", "/")


def requests() -> Iterator[bytes]:
    """What is said to each port, over a connection of its own."""
    for path in READ:
        for headers in ("", "Authorization: Bearer \r\n"):
            yield f"GET {path} HTTP/1.1\r\nHost: a\r\n{headers}Connection: close\r\n\r\n".encode()
    for path, asked in POSTED.items():
        body = json.dumps(asked)
        yield f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
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


def ask_all(places: list[Any], family: socket.AddressFamily, kind: socket.SocketKind) -> dict[str, list[str]]:
    """Say everything to everyone; the whole of what each connection was answered until its end."""
    found: dict[str, list[str]] = {}
    with selectors.DefaultSelector() as waiting:
        for place, said in [(place, said) for place in places for said in requests()]:
            one = socket.socket(family, kind)
            one.settimeout(PATIENCE_S)
            try:
                one.connect(place)
            except OSError as error:
                found.setdefault(repr(place), []).append(f"! {error.strerror}")
                one.close()
                continue
            waiting.register(one, selectors.EVENT_WRITE, (place, said, bytearray()))
        until = time.monotonic() + ANSWERS_S
        while waiting.get_map() and time.monotonic() < until:
            for key, _ in waiting.select(0.1):
                answer(waiting, key, found)
        for key in list(waiting.get_map().values()):
            end(waiting, key, found, "! unfinished")
    return found


def answer(waiting: selectors.BaseSelector, key: selectors.SelectorKey, found: dict[str, list[str]]) -> None:
    one: Any = key.fileobj
    _, said, got = key.data
    why = ""
    try:
        if key.events == selectors.EVENT_WRITE:
            one.send(said)
            waiting.modify(one, selectors.EVENT_READ, key.data)
            return
        if part := one.recv(1 << 16):
            got += part
            return
    except OSError as error:
        why = f"! {error.strerror}"
    end(waiting, key, found, why)


def end(waiting: selectors.BaseSelector, key: selectors.SelectorKey, found: dict[str, list[str]], why: str) -> None:
    """Note what a connection was answered, or why it was not, and close it."""
    one: Any = key.fileobj
    place, _, got = key.data
    found.setdefault(repr(place), []).append(got.decode("latin1") or why)
    waiting.unregister(one)
    one.close()


def stores(places: list[Any]) -> list[str]:
    """The ports that torch takes for a store."""
    found = []
    for host, port in places:
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False)  # type: ignore[attr-defined]
            store.set("stranger", "was here")
            found.append(f"{host}:{port} {store.num_keys()}")
        except Exception:  # noqa: BLE001  whatever torch raises for what is no store
            continue
    return found


def try_files(paths: list[str], read: dict[str, str]) -> list[str]:
    """The operations on files and folders that succeeded."""
    done = []
    for path in paths:
        attempts: dict[str, Callable[[], object]] = {
            "list": lambda path=path: os.listdir(path),
            "write": lambda path=path: os.close(os.open(path, os.O_WRONLY)),
            "append": lambda path=path: os.close(os.open(path, os.O_WRONLY | os.O_APPEND)),
            "create": lambda path=path: os.close(os.open(f"{path}/stranger", os.O_WRONLY | os.O_CREAT, 0o666)),
            "link": lambda path=path: os.link(path, f"/tmp/stranger-{os.getpid()}"),
            "chmod": lambda path=path: os.chmod(path, 0o777),
            "touch": lambda path=path: os.utime(path),
            "truncate": lambda path=path: os.truncate(path, 0),
            "rename": lambda path=path: os.rename(path, f"{path}.stranger"),
            "unlink": lambda path=path: os.unlink(path),
            "rmdir": lambda path=path: os.rmdir(path),
        }
        for what, attempt in attempts.items():
            if succeeds(attempt):
                done.append(f"{what} {path}")
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


def try_process(pid: int, read: dict[str, str]) -> list[str]:
    """The operations on a process that succeeded, but for reading, whose results are added to `read`."""
    libc, done = ctypes.CDLL(None, use_errno=True), []
    buffer = ctypes.create_string_buffer(16)
    ours, theirs = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 16), (ctypes.c_void_p * 2)(0x400000, 16)
    calls = {
        "ptrace attach": lambda: libc.ptrace(16, pid, None, None),
        "ptrace seize": lambda: libc.ptrace(0x4206, pid, None, None),
        "process_vm_readv": lambda: libc.process_vm_readv(pid, ours, 1, theirs, 1, 0),
        "process_vm_writev": lambda: libc.process_vm_writev(pid, ours, 1, theirs, 1, 0),
    }
    done += [name for name, call in calls.items() if call() >= 0]
    attempts: dict[str, Callable[[], object]] = {
        f"signal {number.name}": lambda number=number: os.kill(pid, number) for number in signal.Signals
    }
    attempts |= {
        "signal 0": lambda: os.kill(pid, 0),
        "nice": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        "affinity": lambda: os.sched_setaffinity(pid, {0}),
        "take a descriptor": lambda: os.close(libc.syscall(438, os.pidfd_open(pid), 0, 0)),
        "oom": lambda: Path(f"/proc/{pid}/oom_score_adj").write_text("1000"),
    }
    done += [name for name, attempt in attempts.items() if succeeds(attempt)]
    for folder, _, names in os.walk(f"/proc/{pid}", onerror=None):
        for name in names if "/task/" not in folder else []:
            if (text := contents(f"{folder}/{name}")) is not None:
                read[f"{folder}/{name}"] = text
    for name in ("cwd", "root", "exe"):
        if succeeds(lambda name=name: os.readlink(f"/proc/{pid}/{name}")):
            done.append(f"readlink {name}")
    return [f"{what} of {pid}" for what in done]


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
    told = ask_all(opened, socket.AF_INET, socket.SOCK_STREAM)
    # A port that never answers, as gloo's, would hold torch for ever.
    answering = [place for place in opened if any(answer and not answer.startswith("!") for answer in told.get(repr(place), []))]
    result = {
        "opened": opened,
        "tcp": told,
        "udp": ask_all([tuple(place) for place in targets["udp"]], socket.AF_INET, socket.SOCK_DGRAM),
        "unix": ask_all(sockets, socket.AF_UNIX, socket.SOCK_STREAM),
        "files": try_files(targets["files"], read),
        "processes": [done for pid in targets["pids"] for done in try_process(pid, read)],
        "stores": stores(answering),
        "read": read,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
