"""The controller of a run on this machine, as often as it is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.launch.prepared import Prepared
from asyncmoe.launch.run_processes import STOP_GRACE_S, Process
from asyncmoe.process import Child
from asyncmoe.rpc.environment import KEEPER, TRAINER_EPOCH


class LocalController:
    """A `Starter` for this machine. All starts append to one log.

    Args:
        file: the configuration that it reads.
    """

    def __init__(self, config: Config, file: Path) -> None:
        self._config, self._file = config, file
        self._child: Child | None = None
        self._next = Prepared(config.run.dir, self._started)

    def start(self, epoch: int) -> Process:
        """Start it, or have the one that stands by go on.

        Raises:
            StorageError: the log cannot be opened.
            AsyncmoeError: the system cannot start the process.
        """
        self._child = self._next.take(epoch) or self._started({TRAINER_EPOCH: str(epoch)})
        return self._child

    def prepare(self) -> None:
        """Start the next one, which stands by, unless one does."""
        self._next.prepare()

    def _started(self, more: Mapping[str, str]) -> Child:
        command = [sys.executable, "-m", "asyncmoe", "rollout", str(self._file)]
        environment = {KEEPER: "1" if self._config.keeps_engines else "", **more}
        log = self._config.run.dir / "logs" / "controller.log"
        return Child("controller", command, log, environment, self._config.telemetry.logs.bounds)

    def end(self) -> None:
        """Kill it: another takes its place, and one that hangs or is stopped must not wake up beside it."""
        if self._child is not None:
            self._child.end(0.0)

    def stop(self) -> None:
        """Ask it to end, and kill it if it does not in time."""
        self._next.end(0.0)
        if self._child is not None:
            self._child.end(STOP_GRACE_S)
