"""A run in processes of its own, as a user starts it, and what it records while it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from asyncmoe.errors import InvariantBroken, WaitTimeout
from benchmarks.running_engines import RunningEngine, below

CHECKOUT = Path(__file__).parents[1]
_POLL_S = 0.05
_END_S = 300.0


class LiveRun:
    """`asyncmoe run` of the demo in a folder.

    Attributes:
        dir: the run's directory.

    Args:
        bench: name of the benchmark, for errors.
        settings: overrides of examples/demo.yaml.
        environment: variables besides ours.
    """

    def __init__(self, bench: str, folder: Path, settings: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.dir, self._output, self._bench = folder / "run", folder / "output", bench
        place = (f"run.dir={self.dir}", f"model.path={self.dir / 'model'}", "telemetry.live=off")
        command = [sys.executable, "-m", "asyncmoe", "run", str(CHECKOUT / "examples" / "demo.yaml"), *place, *settings]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **(environment or {})})

    def check(self) -> None:
        """Raise InvariantBroken if the run has ended."""
        if self._process.poll() is not None:
            raise InvariantBroken(f"bench {self._bench}: the run has ended: {self._said()}")

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float) -> float:
        """Return when a condition holds: the monotonic time.

        Raises:
            InvariantBroken: the run ended.
            WaitTimeout: the condition did not hold within `limit_s`.
        """
        until = time.monotonic() + limit_s
        while not condition():
            self.check()
            if time.monotonic() > until:
                raise WaitTimeout(f"the run of bench {self._bench}", f"{what}; its output: {self._said()}", limit_s)
            time.sleep(_POLL_S)
        return time.monotonic()

    def processes(self) -> list[psutil.Process]:
        """The supervisor and all that it has started."""
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def engines(self) -> list[RunningEngine]:
        """Its engines, whether they answer yet or not."""
        return below(psutil.Process(self._process.pid))

    def records(self, name: str) -> list[dict[str, Any]]:
        """All whole lines of a file of records."""
        path = self.dir / name
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def log(self, name: str) -> str:
        """What one of its processes has said."""
        path = self.dir / "logs" / name
        return path.read_text() if path.exists() else ""

    def end(self) -> None:
        """Stop the run as Ctrl-C does, with a last checkpoint.

        Raises:
            InvariantBroken: it did not end in time, and was killed.
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            raise InvariantBroken(f"bench {self._bench}: the run did not end in {_END_S:g} s: {self._said()}")

    def _said(self) -> str:
        return self._output.read_text()[-2000:]
