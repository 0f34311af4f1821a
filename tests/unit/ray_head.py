"""A Ray cluster of this machine that ends with its process, for tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


class RayHead:
    """One node.

    Attributes:
        address: for RAY_ADDRESS.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a Unix socket's path has 107 characters at most
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        free = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--object-store-memory=100000000")
        own = (f"--temp-dir={self._directory}", "--include-dashboard=false", "--disable-usage-stats", "--num-cpus=2", f"--port={port}")
        words = ("start", "--head", "--block", "--node-ip-address=127.0.0.1", *free, *own)
        log = self._directory / "said"
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", *words],
                stdout=sink,
                stderr=sink,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"},
            )
        until = time.monotonic() + 150
        while "Ray runtime started." not in log.read_text():
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)

    def end(self) -> None:
        """End all processes of the node."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in psutil.wait_procs(children, 10)[1]:
            child.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
