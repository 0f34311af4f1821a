"""The trainer's ranks on this machine, under torchrun, as often as they are started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.launch.prepared import Prepared
from asyncmoe.launch.run_processes import STOP_GRACE_S, Process
from asyncmoe.launch.torchrun import free_port, torchrun, trainer_environment
from asyncmoe.process import Child
from asyncmoe.rpc.environment import TRAINER_EPOCH
from asyncmoe.telemetry import processes
from asyncmoe.telemetry.heartbeats import TRAINER


class LocalTrainer:
    """A `Starter` for this machine. All starts append to one log.

    Args:
        file: the configuration that the ranks read.
        command: returns program and arguments of a start.
    """

    def __init__(self, config: Config, file: Path, command: Callable[[Config, Path], list[str]] | None = None) -> None:
        self._config, self._file, self._command = config, file, command or trainer_command
        self._child: Child | None = None
        self._next = Prepared(config.run.dir, self._started)

    def start(self, epoch: int) -> tuple[Process, ...]:
        """Start torchrun with all ranks, or have those that stand by go on.

        Raises:
            StorageError: the log cannot be opened.
            AsyncmoeError: the system cannot start the process.
        """
        self._child = self._next.take(epoch) or self._started({TRAINER_EPOCH: str(epoch)})
        return (self._child,)

    def prepare(self) -> None:
        """Start the next torchrun, whose ranks stand by, unless one does."""
        self._next.prepare()

    def _started(self, more: Mapping[str, str]) -> Child:
        command = self._command(self._config, self._file)
        log = self._config.run.dir / "logs" / "trainer.log"
        return Child("trainer", command, log, {**trainer_environment(os.environ), **more}, self._config.telemetry.logs.bounds)

    def stop(self) -> None:
        """End all ranks, those that stand by too."""
        self._next.end(STOP_GRACE_S)
        self.end()

    def end(self) -> None:
        """End torchrun, which ends the ranks, and kill each rank that is left: one that is stopped does not hear that it shall end."""
        if self._child is not None:
            self._child.end(STOP_GRACE_S)
            kill_ranks(self._config.run.dir)


def kill_ranks(run_dir: Path) -> None:
    """Send SIGKILL to every trainer rank of a run that still runs on this host."""
    for rank in processes.read(run_dir):
        if rank.role.startswith(TRAINER) and processes.runs(rank):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(rank.pid, signal.SIGKILL)


def trainer_command(config: Config, resolved: Path, module: str = "asyncmoe.trainer", *arguments: str) -> list[str]:
    """Return the torchrun command for all trainer ranks on this machine."""
    return [sys.executable, *torchrun(config.trainer.ranks, ("127.0.0.1", free_port("127.0.0.1")), module, str(resolved), *arguments)]
