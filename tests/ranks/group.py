"""Setup and teardown of the ranks of a worker."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from asyncmoe.process import leave
from asyncmoe.trainer.model import mesh


def run(worker: Callable[..., object]) -> NoReturn:
    """Be a rank of a worker, on one core and without a word: call it with the program's arguments but the first, `result`, which gets what
    rank 0 returns. Ends as a trainer's rank does."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    found = worker(*sys.argv[2:])
    if dist.get_rank() == 0:
        result().write_text(json.dumps(found, indent=1))
    mesh.stop()
    leave(0)


def result() -> Path:
    """Rank 0's result file, in a folder of the launch."""
    return Path(sys.argv[1])


def everyone(mine: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values
