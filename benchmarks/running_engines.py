"""Access to the engines that a process has started: their keys are in their environments, which only the process's user can read."""

from __future__ import annotations

import json
import urllib.request
from contextlib import suppress
from dataclasses import dataclass

import psutil

from asyncmoe.platform.sglang.lifetime import API_KEY

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RunningEngine:
    """The main process of an engine.

    Attributes:
        seed: the run's seed plus the engine's index, plus the number of engines for each restart.
    """

    process: psutil.Process
    seed: int
    url: str
    key: str

    def slow_down(self, seconds: float) -> None:
        """Make it sleep in every forward pass. Raises OSError: it did not respond, or refused."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        body = json.dumps({"forward_sleep_time": seconds}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/slow_down", body, headers), timeout=_TIMEOUT_S):
            pass


def below(parent: psutil.Process) -> list[RunningEngine]:
    """Return the engines among the descendants of a process, ready or not."""
    found = []
    for child in parent.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words, environment = child.cmdline(), child.environ()
            if "asyncmoe.platform.sglang" in words and "--random-seed" in words:
                seed, host, port = (words[words.index(option) + 1] for option in ("--random-seed", "--host", "--port"))
                found.append(RunningEngine(child, int(seed), f"http://{host}:{port}", environment[API_KEY]))
    return found
