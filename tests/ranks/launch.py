"""Runs a worker script under torchrun on this machine and returns what rank 0 wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def run(worker: str, ranks: int, out: Path, *arguments: str, timeout_s: float = 240.0) -> Any:
    """Start `worker` (a file beside this one) on `ranks` gloo ranks; the JSON it writes to its first argument.

    A worker that fails or takes longer than `timeout_s` fails the test with the end of its output.
    """
    result, log = out / f"{worker}-{ranks}.json", out / f"{worker}-{ranks}.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{HERE.parent.parent}"}
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, "-m", "tests.ranks.worker", str(HERE / f"{worker}.py"), str(result), *arguments],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code: object = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = f"no end after {timeout_s} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code != 0:
        pytest.fail(f"{worker} on {ranks} ranks: {code}\n{log.read_text()[-6000:]}", pytrace=False)
    return json.loads(result.read_text())
