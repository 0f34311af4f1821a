"""The trainer's ranks on this machine, under torchrun."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.launch.torchrun import free_port, torchrun
from asyncmoe.telemetry import processes


def kill(run_dir: Path, *roles: str) -> None:
    """Send SIGKILL to every process of a run that still runs on this host and whose role begins with one of `roles`."""
    for one in processes.read(run_dir):
        if one.role.startswith(roles) and processes.runs(one):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(one.pid, signal.SIGKILL)


def trainer_command(config: Config, resolved: Path, module: str = "asyncmoe.trainer", *arguments: str) -> list[str]:
    """Return the torchrun command for all trainer ranks on this machine."""
    return [sys.executable, *torchrun(config.trainer.ranks, ("127.0.0.1", free_port("127.0.0.1")), module, str(resolved), *arguments)]
