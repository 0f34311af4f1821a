"""The variables by which launchers tell the processes that they start what differs from one start to the next."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from asyncmoe.errors import UserError

STARTS = "ASYNCMOE_STARTS"
"""How often the launcher has started this engine before, without the restarts of its own; absent or 0: this is its first start."""
TRAINER_EPOCH = "ASYNCMOE_TRAINER_EPOCH"
"""How often the launcher has started the trainer again in place; absent or 0: this is its first start."""
AGENT = "ASYNCMOE_AGENT"
"""Process id of the torchrun that started this rank, which has another parent once that torchrun is killed."""
RANKS_STORE = "ASYNCMOE_RANKS_STORE"
"""File of the store (torch's `FileStore`) in which all ranks of a trainer meet; absent: torchrun's address (MASTER_ADDR)."""


def trainer_epoch(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has started this process's trainer again in place. Raises as `starts_before`."""
    return _count(TRAINER_EPOCH, environment)


def starts_before(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has started this engine before.

    Raises:
        UserError: the variable is no such number.
    """
    return _count(STARTS, environment)


def _count(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "") or "0"
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UserError(name, got=repr(text), expected="a number from 0, of earlier starts", hint="only launchers set it: unset it")
    return int(text)
