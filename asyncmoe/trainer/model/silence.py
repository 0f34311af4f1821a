"""What a rank says when another one falls silent in a collective.

gloo says only that it waited, not for whom. Every rank that waits in vain reports that in the store through which the ranks met; a rank
that hangs, and so was waited for, does not.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from asyncmoe.errors import AsyncmoeError

_WAITED = re.compile(r"Timed out waiting (\d+)ms for (?:recv|send) operation")
"""gloo/transport/tcp/unbound_buffer.cc, which torch 2.9 has."""
_REPORTS_S = 3.0
"""Seconds in which other ranks report that they waited too."""
_NAMED = 8


def explained(error: BaseException) -> AsyncmoeError | None:
    """Return an error that names the ranks which hang, if `error` is the end of a wait for other ranks; else None."""
    found = _WAITED.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None or not dist.is_initialized():
        return None
    silent = _silent(dist.get_rank(), dist.get_world_size())
    whom = f"trainer rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent[:_NAMED]))}" if silent else "another trainer rank"
    more = f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
    seconds = int(found.group(1)) / 1000
    return AsyncmoeError(f"{whom}{more} took no part in a collective for {seconds:g} s (trainer.timeout_s): hung, stopped or slow")


def _silent(rank: int, world: int) -> list[int]:
    """Return the ranks that do not report in time."""
    store: Any = distributed_c10d._get_default_store()
    missing = [other for other in range(world) if other != rank]
    try:
        store.set_timeout(timedelta(seconds=_REPORTS_S))
        store.set(_key(rank), "")
        until = time.monotonic() + _REPORTS_S
        while missing and time.monotonic() < until:
            missing = [other for other in missing if not store.check([_key(other)])]
            time.sleep(0.1)
    except RuntimeError:  # the store's rank is gone
        return []
    return missing


def _key(rank: int) -> str:
    return f"asyncmoe/waited/{rank}"
