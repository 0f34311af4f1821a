"""An event loop whose clock goes as fast as nothing happens: waiting costs no time, and what is measured in it is exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Instead of waiting, it moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everything waits, and for nothing that a clock brings")
        self.now += max(timeout, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(body: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing but time and other coroutines, from second 0 on."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(body)
