"""Notices that this process has stood still: it was stopped, or its machine had no time for it.

What others have sent meanwhile waits to be read, and a limit that ran out meanwhile says nothing of them.
"""

from __future__ import annotations

import time

_STILL_S = 2.0
"""Looks are twice a second; a longer gap between two of them is a standstill."""


class Standstill:
    """Call `look` at least twice a second."""

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
        """Return whether the process has stood still after `moment` of the monotonic clock; looks too."""
        self.look()
        return self._until >= moment
