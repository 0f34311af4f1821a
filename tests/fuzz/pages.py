"""Raw requests to the HTTP servers of the engines."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from random import Random

from asyncmoe.config import parse
from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from asyncmoe.platform.sglang.lifetime import API_KEY
from asyncmoe.process import Child
from asyncmoe.rollout.engines.sglang.process import command, environment
from tests.fuzz import mutate

_KEY = "key-of-the-run"


class Engine:
    """A real engine, which starts when it is first attacked.

    Attributes:
        pid: of its main process, which answers HTTP.
    """

    def __init__(self) -> None:
        self._port, self._held = 0, ExitStack()
        self.pid = 0

    def stranger(self, random: Random, count: int) -> dict[str, int]:
        """Send `count` mutated requests without the key, or with a wrong one, to the routes that a run uses; return as `report` does.
        None is let in. Afterwards the engine generates."""
        port, found = self._started(), Counter[str]()
        corpus = [_posted(path, body, key) for path, body in _ROUTES.items() for key in ("", f"{_KEY}x")]
        for _ in range(count):
            found[_asked(port, mutate.octets(random, random.choice(corpus), random.choice(corpus)))] += 1
        assert not any(answer.startswith("2") for answer in found), found
        assert _status(port, "/health_generate", _KEY) == 200
        return dict(found)

    def close(self) -> None:
        self._held.close()

    def _started(self) -> int:
        if self._port:
            return self._port
        folder = Path(self._held.enter_context(tempfile.TemporaryDirectory()))
        make_model(folder / "model", MadeModel(), seed=0)
        values = {"run": {"dir": str(folder), "steps": 1}, "model": {"path": str(folder / "model")}, "task": {"kind": "arithmetic"}}
        config = parse({**values, "engines": {"dtype": "float32", "max_running": 8}})
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        words = command(config, 0, "127.0.0.1", port, keeps_routing=False, seed=0, adapter=None)
        child = Child("engine.0", words, folder / "log", environment(config, 0) | {API_KEY: _KEY})
        self._held.callback(child.end, 0.0)
        until = time.monotonic() + _START_S
        while _status(port, "/ready", _KEY) != 200:
            assert child.returncode is None, child.output()[-2000:]
            assert time.monotonic() < until, "the engine did not start"
            time.sleep(0.5)
        self._port, self.pid = port, child.pid
        return port


_START_S = 300.0
_ROUTES = {
    "/generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "temperature": 1.0}, "return_logprob": True},
    "/pause_generation": {"mode": "in_place"},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/abort_request": {"rid": "", "abort_all": True},
    "/flush_cache": {},
    "/slow_down": {"forward_sleep_time": 60.0},
}


def _posted(path: str, body: object, key: str) -> bytes:
    text = json.dumps(body).encode()
    known = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{known}Content-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + text


def _status(port: int, path: str, key: str = "") -> int:
    """Status of a right request; 0 without an answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def _asked(port: int, text: bytes) -> str:
    """Return the status of the answer to `text`; "none" without one."""
    with socket.create_connection(("127.0.0.1", port), 10.0) as plug:
        plug.settimeout(20.0)
        try:
            plug.sendall(text)
            plug.shutdown(socket.SHUT_WR)
            answer = plug.recv(64)
            while plug.recv(1 << 16):
                pass
        except ConnectionError:
            return "none"
    first = answer.split(b" ", 2)
    return first[1].decode() if answer.startswith(b"HTTP/") and len(first) > 1 else "none"
