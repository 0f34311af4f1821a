"""Waiting for a condition over plain data that others change, in one asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from asyncmoe.errors import AsyncmoeError

T = TypeVar("T")


class Changes:
    """Wakes everyone who waits whenever anything changes. Waiters look again themselves, so no change can be missed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._failure: AsyncmoeError | None = None

    def wake(self) -> None:
        """Something has changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def fail(self, error: AsyncmoeError) -> None:
        """Nothing more will change: raise `error` in everyone whose condition does not hold."""
        self._failure = error
        self.wake()

    async def until(self, ready: Callable[[], T | None], wait_s: float | None) -> T | None:
        """The first value of `ready` that is not None; None when `wait_s` seconds (None: no bound) are over.

        Returns without giving up control when `ready` has a value at once.

        Raises:
            AsyncmoeError: what `fail` was called with.
        """
        deadline = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        while (value := ready()) is None:
            if self._failure is not None:
                raise self._failure
            # Taken after `ready`, which may itself wake others: nothing can change between here and the wait.
            changed = self._changed
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return ready()
        return value
