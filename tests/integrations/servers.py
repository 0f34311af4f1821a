"""Real servers on this machine, each a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen


@contextmanager
def serving(command: Sequence[str], url: str, within_s: float, folder: Path | None = None) -> Iterator[None]:
    """A server until its use is over. Returns once it answers at `url`, whatever it says."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=folder, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        until = time.monotonic() + within_s
        while not _answers(url):
            assert process.poll() is None, f"{command[:4]} ended with {process.returncode}"
            assert time.monotonic() < until, f"{url} does not answer"
            time.sleep(0.2)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too, which may not heed a mere request under load
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        urlopen(url, timeout=5).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True
