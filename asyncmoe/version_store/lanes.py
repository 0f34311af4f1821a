"""Do a number of things, a few at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
LANES = 4
"""Objects, or ranges of objects, that a rank has in memory and under way at a time."""


def each(act: Callable[[int], T], count: int, lanes: int, name: str) -> list[T]:
    """Return `act(i)` for every i below `count`; after the first error begin no more, and raise it once those under way have ended.

    Args:
        lanes: how many are under way at a time.
        name: of the threads.
    """
    if count == 0:
        return []
    with ThreadPoolExecutor(max(1, min(lanes, count)), name) as threads:
        under_way = [threads.submit(act, number) for number in range(count)]
        done, left = wait(under_way, return_when=FIRST_EXCEPTION)
        for one in left:
            one.cancel()
        failed = [error for one in done if not one.cancelled() and (error := one.exception()) is not None]
        if failed:
            raise failed[0]
        return [one.result() for one in under_way]
