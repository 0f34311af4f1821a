"""What the ranks of a worker begin and end with."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def begin() -> None:
    """Join the group, on one core and without a word."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")


def everyone(mine: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values


def end(result: Path, found: object) -> None:
    """Write what rank 0 found, and leave the group."""
    from asyncmoe.trainer.model import mesh  # Megatron, which not every worker imports

    if dist.get_rank() == 0:
        result.write_text(json.dumps(found, indent=1))
    mesh.stop()
