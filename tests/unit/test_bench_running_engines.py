"""Benchmarks find the engines of a run and reach them with their keys."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from urllib.error import HTTPError

import psutil
import pytest

from asyncmoe.platform.sglang.lifetime import API_KEY
from benchmarks.running_engines import RunningEngine, below

ENGINE = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        admitted = self.headers["Authorization"] == "Bearer " + os.environ["ASYNCMOE_ENGINE_KEY"]
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        print(self.path, body, flush=True)
        self.send_response(200 if admitted else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass

server = HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer)
print("listens", flush=True)
server.serve_forever()
"""


def test_an_engine_is_slowed_down_with_the_key_of_its_environment() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    words = ["asyncmoe.platform.sglang", "--host", "127.0.0.1", "--port", str(port), "--random-seed", "3"]
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, *words], stdout=subprocess.PIPE, text=True, env={**os.environ, API_KEY: "secret"}
    ) as engine:
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "listens\n"
            (found,) = below(psutil.Process())
            assert (found.process.pid, found.seed, found.url) == (engine.pid, 3, f"http://127.0.0.1:{port}")
            found.slow_down(0.25)
            assert engine.stdout.readline() == '/slow_down {"forward_sleep_time": 0.25}\n'
            with pytest.raises(HTTPError, match="401"):
                RunningEngine(found.process, found.seed, found.url, "another").slow_down(0.25)
        finally:
            engine.kill()
