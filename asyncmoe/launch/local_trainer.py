"""The trainer's ranks on this machine, under torchrun, as often as they are started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.launch.run_processes import STOP_GRACE_S, Process
from asyncmoe.launch.torchrun import TRAINER_ENVIRONMENT, free_port, torchrun
from asyncmoe.process import Child
from asyncmoe.rpc.environment import TRAINER_EPOCH
from asyncmoe.telemetry import processes
from asyncmoe.telemetry.heartbeats import TRAINER


class LocalTrainer:
    """A `TrainerStarter` for this machine. All starts append to one log.

    Attributes:
        epoch: of the newest start.

    Args:
        file: the configuration that the ranks read.
        command: returns program and arguments of a start.
    """

    def __init__(self, config: Config, file: Path, command: Callable[[Config, Path], list[str]] | None = None) -> None:
        self._config, self._file, self._command = config, file, command or trainer_command
        self._child: Child | None = None
        self.epoch = 0

    def start(self, epoch: int) -> tuple[Process, ...]:
        """Start torchrun with all ranks.

        Raises:
            StorageError: the log cannot be opened.
            AsyncmoeError: the system cannot start the process.
        """
        self.epoch = epoch
        command = self._command(self._config, self._file)
        environment = {**TRAINER_ENVIRONMENT, TRAINER_EPOCH: str(epoch)}
        log = self._config.run.dir / "logs" / "trainer.log"
        self._child = Child("trainer", command, log, environment, self._config.telemetry.logs.bounds)
        return (self._child,)

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
