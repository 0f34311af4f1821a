"""A user's coroutine function or method, run in the controller's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import cast

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring import plugin
from asyncmoe.rollout.scoring.judge import reason_of, said
from asyncmoe.rollout.scoring.types import ERROR, TIMEOUT, Sample

log = logging.getLogger(__name__)
_CLOSE_S = 5.0


class AsyncScorer:
    """See `Judge`.

    Args:
        ask: the coroutine function, called with a sample.
        made: the object that owns it, if any; `close` closes it.
        timeout_s: limit for one call.
    """

    width: int | None = None

    def __init__(self, ask: Callable[[Sample], object], made: object | None, timeout_s: float) -> None:
        self._ask = cast(Callable[[Sample], Awaitable[object]], ask)
        self._made, self._timeout_s = made, timeout_s

    async def call(self, sample: Sample) -> object:
        """See `Judge`."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await self._ask(sample)
        except TrajectoryRejected:
            raise
        except Exception as error:
            # The user's function may also raise TimeoutError.
            if deadline.expired():
                raise TrajectoryRejected(TIMEOUT, f"the scorer took longer than {self._timeout_s:g} s") from error
            raise TrajectoryRejected(reason_of(error, ERROR), said(error)) from error

    async def close(self) -> None:
        """See `Judge`. Only logs an error of the object's own `close`: the run is over, and its result stands."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await plugin.close(self._made)
        except Exception as error:  # noqa: BLE001  user code may raise anything
            log.warning("the scorer's close() failed: %s", said(error))
