"""The trainer's ranks on this machine, under torchrun, as often as they are started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.launch.prepared import LocalStarter
from asyncmoe.launch.run_processes import STOP_GRACE_S
from asyncmoe.launch.torchrun import free_port, torchrun, trainer_environment
from asyncmoe.process import Child
from asyncmoe.telemetry import processes
from asyncmoe.telemetry.heartbeats import TRAINER


class LocalTrainer(LocalStarter):
    """A `Starter` of torchrun with all ranks.

    Args:
        file: the configuration that the ranks read.
        command: returns program and arguments of a start.
    """

    def __init__(self, config: Config, file: Path, command: Callable[[Config, Path], list[str]] | None = None) -> None:
        command, log = command or trainer_command, config.run.dir / "logs" / "trainer.log"

        def start(more: Mapping[str, str]) -> Child:
            return Child("trainer", command(config, file), log, {**trainer_environment(os.environ), **more}, config.telemetry.logs.bounds)

        super().__init__(config.run.dir, start)

    def end(self, grace_s: float = STOP_GRACE_S) -> None:
        """End torchrun, which ends the ranks, and kill each rank that is left: one that is stopped does not hear that it shall end."""
        super().end(grace_s)
        kill_ranks(self._run_dir)


def kill_ranks(run_dir: Path) -> None:
    """Send SIGKILL to every trainer rank of a run that still runs on this host."""
    for rank in processes.read(run_dir):
        if rank.role.startswith(TRAINER) and processes.runs(rank):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(rank.pid, signal.SIGKILL)


def trainer_command(config: Config, resolved: Path, module: str = "asyncmoe.trainer", *arguments: str) -> list[str]:
    """Return the torchrun command for all trainer ranks on this machine."""
    return [sys.executable, *torchrun(config.trainer.ranks, ("127.0.0.1", free_port("127.0.0.1")), module, str(resolved), *arguments)]
