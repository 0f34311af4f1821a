"""Environment variables by which launchers tell their processes what differs between starts."""

from __future__ import annotations

import os

STARTS = "ASYNCMOE_STARTS"
"""How often the launcher has started this engine before, not counting the engine's own restarts; absent or 0: this is the first start."""
TRAINER_EPOCH = "ASYNCMOE_TRAINER_EPOCH"
"""How often the launcher has restarted the trainer in place; absent or 0: this is the first start."""
AGENT = "ASYNCMOE_AGENT"
"""Process ID of the torchrun that started this rank; once that torchrun is killed, the rank has another parent."""
OWN_THREADS = "ASYNCMOE_OWN_THREADS"
"""Present if OMP_NUM_THREADS is asyncmoe's default, and not the user's."""
RANKS_STORE = "ASYNCMOE_RANKS_STORE"
"""File of the store (torch's `FileStore`) in which all ranks of a trainer meet; absent: torchrun's address (MASTER_ADDR)."""


def trainer_epoch() -> int:
    """Return how often the launcher has restarted this process's trainer in place."""
    return int(os.environ.get(TRAINER_EPOCH) or 0)
