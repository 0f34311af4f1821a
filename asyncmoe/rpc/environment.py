"""The variables by which launchers tell the processes that they start what differs from one start to the next."""

from __future__ import annotations

import os

STARTS = "ASYNCMOE_STARTS"
"""How often the launcher has started this engine before, without the restarts of its own; absent or 0: this is its first start."""
TRAINER_EPOCH = "ASYNCMOE_TRAINER_EPOCH"
"""How often the launcher has started the trainer again in place; absent or 0: this is its first start."""
AGENT = "ASYNCMOE_AGENT"
"""Process id of the torchrun that started this rank, which has another parent once that torchrun is killed."""
RANKS_STORE = "ASYNCMOE_RANKS_STORE"
"""File of the store (torch's `FileStore`) in which all ranks of a trainer meet; absent: torchrun's address (MASTER_ADDR)."""


def trainer_epoch() -> int:
    """Return how often the launcher has started this process's trainer again in place."""
    return int(os.environ.get(TRAINER_EPOCH) or 0)


def starts_before() -> int:
    """Return how often the launcher has started this engine before."""
    return int(os.environ.get(STARTS) or 0)
