"""The time of records: Unix seconds, whatever becomes of the system's clock meanwhile."""

from __future__ import annotations

import time

_BEGIN = time.time() - time.monotonic()


def unix() -> float:
    """Return the Unix time as of the start of this process, which the monotonic clock carries on.

    A system's clock that is set while a process runs changes no duration between two of its records. Clocks of processes that started
    before and after that differ.
    """
    return _BEGIN + time.monotonic()
