"""Detects that this process stood still: it was stopped, or its machine gave it no CPU time.

Messages that arrived meanwhile are still unread, so a limit that expired meanwhile proves nothing about their senders.
"""

from __future__ import annotations

import time

_STILL_S = 2.0
"""Calls of `look` come twice a second; a longer gap between two of them is a standstill."""


class Standstill:
    """Detects standstills; call `look` at least twice a second."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._until = float("-inf")

    def look(self) -> float:
        """Return how long the process stood still since the last look, in seconds; 0 if it did not."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap <= _STILL_S:
            return 0.0
        self._until = now
        return gap

    def since(self, moment: float) -> bool:
        """Return whether the process stood still after `moment` of the monotonic clock. Calls `look`."""
        self.look()
        return self._until >= moment
