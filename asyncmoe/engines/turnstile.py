"""Lets tasks that compute for a while take turns with everything else in their event loop.

An event loop runs all that is ready before it looks for anything new. When hundreds of engines' answers are ready at once, a heartbeat or
a weight update would wait until the last of them is read. Behind a turnstile each turn of the loop takes in a few milliseconds' worth, and
the others keep their order.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from weakref import WeakKeyDictionary

BUDGET_S = 0.002
"""Computing after which no further task passes in the same turn of the loop."""


class Turnstile:
    """One event loop's."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._began: float | None = None  # when the first task passed in this turn of the loop

    async def wait(self) -> None:
        """Return at once, or in a later turn of the loop if enough tasks have passed in this one."""
        if self._waiting or not self._room():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self._next_turn()
            await turn
        self._next_turn()

    def full(self) -> bool:
        """Return whether this turn of the loop has computed long enough. Counted from the first call, or task that passed, of the turn."""
        full = not self._room()
        self._next_turn()
        return full

    def _room(self) -> bool:
        return self._began is None or time.monotonic() - self._began < BUDGET_S

    def _next_turn(self) -> None:
        if self._began is None:
            self._began = time.monotonic()
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Begin the next turn: pass the first task that still waits. It runs in the turn after this one."""
        self._began = None
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # its task was cancelled
                first.set_result(None)
                self._next_turn()
                return


_TURNSTILES: WeakKeyDictionary[asyncio.AbstractEventLoop, Turnstile] = WeakKeyDictionary()


def turnstile() -> Turnstile:
    """Return the running event loop's."""
    loop = asyncio.get_running_loop()
    found = _TURNSTILES.get(loop)
    if found is None:
        found = _TURNSTILES[loop] = Turnstile()
    return found
