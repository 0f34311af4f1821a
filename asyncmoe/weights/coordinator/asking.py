"""One call to several engines at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from asyncmoe.engines.member import Member
from asyncmoe.engines.types import EngineLost
from asyncmoe.errors import AsyncmoeError, WeightSyncError

Failures = list[tuple[Member, AsyncmoeError]]
"""Engines that failed, and why; the cause before its consequences."""


async def on_each(members: Sequence[Member], action: Callable[[Member], Awaitable[None]]) -> Failures:
    """Run `action` on all members concurrently; return the members that failed."""
    results = await asyncio.gather(*(action(member) for member in members), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, AsyncmoeError):
            raise result
    failed = [(m, result) for m, result in zip(members, results, strict=True) if isinstance(result, AsyncmoeError)]
    return sorted(failed, key=lambda pair: isinstance(pair[1], EngineLost))


def raise_first(failed: Failures, doing: str) -> None:
    """Raise WeightSyncError if any engine failed."""
    if failed:
        raise WeightSyncError(f"{doing}: {failed[0][1]}") from failed[0][1]
