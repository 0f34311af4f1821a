"""A Ray cluster of this process, for tests."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_PATIENT = {"RAY_gcs_server_request_timeout_seconds": "300", "RAY_raylet_start_wait_time_s": "300", "RAY_USAGE_STATS_ENABLED": "0"}
"""For a machine that does much else."""

_TOKEN = secrets.token_hex(32)
"""One for all clusters of this process, as Ray reads it once."""


@contextmanager
def cluster() -> Iterator[Any]:
    """Yield the module, connected; other processes find the cluster by RAY_ADDRESS."""
    import ray

    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a Unix socket's path has 107 characters at most
    quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _PATIENT.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        # By default Ray writes a token for all of the user's clusters. Its mode was read with the import; ray.init sets one if none is set.
        token = Path(directory, "token")
        token.write_text(_TOKEN)
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.delenv("RAY_AUTH_MODE")
        ray.init(address="local", num_cpus=2, object_store_memory=100_000_000, _temp_dir=directory, **quiet)
        try:
            patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
            yield ray
        finally:
            ray.shutdown()
            shutil.rmtree(directory, ignore_errors=True)
