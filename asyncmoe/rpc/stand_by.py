"""A process that stands by: it has loaded its programs, which takes most of a start, and waits until the one before it is lost.

It holds nothing of the run, and writes nothing. Its launcher (`asyncmoe.launch.prepared`) has it go on with a file, which says how often
the trainer was started again in place.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from asyncmoe.rpc.environment import STAND_BY, TRAINER_EPOCH
from asyncmoe.storage import replace, writing

_LOOK_S = 0.1


def is_told() -> bool:
    """Return True if this process is to stand by."""
    return bool(os.environ.get(STAND_BY))


def wait() -> None:
    """Return when this process is to go on; at once if it does not stand by."""
    if not (name := os.environ.pop(STAND_BY, "")):
        return
    path = Path(name)
    while not path.exists():
        time.sleep(_LOOK_S)
    os.environ[TRAINER_EPOCH] = path.read_text()


def go_on(path: Path, epoch: int) -> None:
    """Have all processes go on that stand by with a file.

    Raises:
        StorageError: the file cannot be written.
    """
    with writing("the word for a process that stands by", path):
        replace(path, str(epoch).encode())
