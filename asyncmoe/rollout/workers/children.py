"""The processes of the rollout workers that the controller starts beside itself."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError
from asyncmoe.process import Child
from asyncmoe.rollout.workers.process import process_name

log = logging.getLogger(__name__)
_GRACE_S, _LOOK_S = 5.0, 0.5


class WorkerProcesses:
    """The workers of this machine; none unless `rollout.start_workers`."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._children: dict[int, Child] = {}
        self._restarts: Counter[int] = Counter()

    def start(self) -> None:
        """Start all. Call it from the main thread, because Linux ends a worker when the thread that started it ends.

        Raises:
            StorageError: a log cannot be opened.
            AsyncmoeError: the system cannot start a process.
        """
        rollout = self._config.rollout
        for number in range(1, rollout.workers + 1 if rollout.start_workers else 1):
            self._children[number] = self._started(number)

    async def watch(self, lost: Callable[[], Collection[tuple[str, int]]]) -> None:
        """Start workers again that have ended; never returns.

        Args:
            lost: returns host and process id of workers that do not answer, which are killed first.

        Raises:
            AsyncmoeError: one has ended more than `engines.restarts` times.
            StorageError: as `start`.
        """
        host, most = socket.gethostname(), self._config.engines.restarts
        while True:
            hanging = {pid for where, pid in lost() if where == host}
            for number, child in self._children.items():
                if child.returncode is None and child.pid in hanging:
                    child.kill()
                if child.returncode is None:
                    continue
                if self._restarts[number] >= most:
                    raise AsyncmoeError(f"{child.why()}; engines.restarts = {most} lets it start again no more")
                self._restarts[number] += 1
                log.warning("%s; it starts again, restart %d", child.why(), self._restarts[number])
                self._children[number] = self._started(number)
            await asyncio.sleep(_LOOK_S)

    def end(self) -> None:
        """Ask those to end that have not been told that the run is over, and kill those that do not in time. Blocks, for 10 s at most:
        the launcher waits for 20 s."""
        until = time.monotonic() + _GRACE_S
        late = [child for child in self._children.values() if not child.wait(max(0.0, until - time.monotonic()))]
        with ThreadPoolExecutor(max(1, len(late))) as threads:
            list(threads.map(lambda child: child.end(_GRACE_S), late))

    def _started(self, number: int) -> Child:
        name, log = process_name(number), self._run_dir / "logs" / f"rollout-{number}.log"
        command = [sys.executable, "-m", "asyncmoe", "worker", str(self._run_dir / "config.yaml"), "--number", str(number)]
        return Child(name, command, log)
