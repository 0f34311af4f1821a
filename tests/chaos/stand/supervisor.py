"""`asyncmoe` with the ranks of `rank` in place of the trainer's: `python -m tests.chaos.stand.supervisor run CONFIG`."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncmoe.__main__ import main
from asyncmoe.config import Config
from asyncmoe.launch import local_trainer


def trainer_command(config: Config, resolved: Path, module: str = "", *arguments: str) -> list[str]:
    """Return the command that starts the ranks."""
    return [sys.executable, "-m", "tests.chaos.stand.agent", str(resolved), str(config.trainer.ranks)]


if __name__ == "__main__":
    local_trainer.trainer_command = trainer_command
    main()
