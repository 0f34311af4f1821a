"""Waits for a condition on plain data that other tasks of the same asyncio loop change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from asyncmoe.errors import AsyncmoeError

T = TypeVar("T")


class Changes:
    """Wakes all waiters at every change. Each waiter checks its own condition again, so no change is missed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._failure: AsyncmoeError | None = None

    def wake(self) -> None:
        """Announce a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def fail(self, error: AsyncmoeError) -> None:
        """Announce that nothing more will change: raise `error` in every waiter whose condition does not hold."""
        self._failure = error
        self.wake()

    async def until(self, ready: Callable[[], T | None], wait_s: float | None = None) -> T | None:
        """Return the first value of `ready` that is not None, or None after `wait_s` seconds (None: no limit).

        Returns without yielding to the loop if `ready` has a value at once.

        Raises:
            AsyncmoeError: the error passed to `fail`.
        """
        deadline = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        while (value := ready()) is None:
            if self._failure is not None:
                raise self._failure
            # Read after `ready`, which may itself call `wake`: nothing can change between this line and the wait.
            changed = self._changed
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return ready()
        return value
