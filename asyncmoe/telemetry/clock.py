"""The time of records: Unix seconds, unaffected by changes of the system clock."""

from __future__ import annotations

import time

_BEGIN = time.time() - time.monotonic()


def unix() -> float:
    """Return the Unix time at the start of this process plus the monotonic time since.

    Setting the system clock while a process runs changes no duration between its records, but processes that start later record
    shifted times.
    """
    return _BEGIN + time.monotonic()
