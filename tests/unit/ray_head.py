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

_HOST = "127.0.0.2"
"""Ray takes 127.0.0.1 for the address of no node."""
_PATIENT = {"RAY_gcs_server_request_timeout_seconds": "300", "RAY_raylet_start_wait_time_s": "300"}
_START_S = 240.0


class RayHead:
    """One node.

    Attributes:
        address: for RAY_ADDRESS.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a Unix socket's path has 107 characters at most
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            port = probe.getsockname()[1]
        self.address = f"{_HOST}:{port}"
        free = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--object-store-memory=100000000")
        own = (f"--temp-dir={self._directory}", "--include-dashboard=false", "--disable-usage-stats", "--num-cpus=2", f"--port={port}")
        words = ("start", "--head", "--block", f"--node-ip-address={_HOST}", *free, *own)
        log = self._directory / "said"
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", *words],
                stdout=sink,
                stderr=sink,
                env={**os.environ, **_PATIENT, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"},
            )
        until = time.monotonic() + _START_S
        while "Ray runtime started." not in (said := log.read_text()):
            if self._process.poll() is not None or time.monotonic() > until:
                self.end()
                raise AssertionError(said)
            time.sleep(0.1)

    def end(self) -> None:
        """End all processes of the node."""
        children = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in psutil.wait_procs(children, 10)[1]:
            child.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
