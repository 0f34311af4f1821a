"""A controller that stands by: it has loaded its programs, which takes most of a start, and waits until the one before it is lost.

It holds nothing of the run. Its launcher gives it its turn by a file, which says how often the trainer was started again in place.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.rpc.environment import TRAINER_EPOCH
from asyncmoe.storage import writing

_LOOK_S = 0.1


def turn_of(run_dir: Path, pid: int) -> Path:
    """Return the file that gives a process its turn."""
    return run_dir / f".controller-{pid}"


def give_turn(run_dir: Path, pid: int, epoch: int) -> None:
    """Have a process that stands by become the controller.

    Raises:
        StorageError: the file cannot be written.
    """
    path = turn_of(run_dir, pid)
    with writing("the turn of the next controller", path):
        part = path.with_suffix(".part")
        part.write_text(str(epoch))
        part.replace(path)


def wait_for_turn(config: Config) -> None:
    """Load what a controller needs, and return when it is this process's turn."""
    from asyncmoe.rollout.tokenizer import Tokenizer

    Tokenizer(config.model.path, config.model.trust_remote_code)  # imports what loading it again needs
    path = turn_of(config.run.dir, os.getpid())
    while not path.exists():
        time.sleep(_LOOK_S)
    os.environ[TRAINER_EPOCH] = path.read_text()
    path.unlink()
