"""Checks that engines generate. An engine that accepts requests may still answer none: its scheduler or detokenizer hangs or is gone.

Each engine is probed: a probe succeeds once the engine produces a token for any request, and samples one itself if the engine is idle. An
engine that fails a probe, or lets a request time out, is a suspect: it gets requests only if all others are suspects too. An engine that
stays silent is fenced. An engine that is paused for a weight update is not probed: the update's calls have their own limits. An engine that
does not pause, or swap a version in, within `PAUSE_SHARE` of `hang_timeout_s` is fenced (`asyncmoe.weights.coordinator`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from asyncmoe.engines.member import Member
from asyncmoe.engines.pool import Pool

_PROBES = 6
"""Probes per `hang_timeout_s`. An engine is fenced after `_PROBES - 1` failures, because the first failing probe may begin a whole interval
after the engine's last sign of life."""
PAUSE_SHARE = 1 / 3
"""Share of `hang_timeout_s` within which a running engine must pause, or swap weights in."""
_POLL_S = 0.2


class Liveness:
    """Probes every engine of a pool.

    Args:
        hang_timeout_s: seconds after its last token within which a silent engine is fenced.
        paused: returns True while an engine cannot sample, which does not count as silence.
    """

    def __init__(self, pool: Pool, hang_timeout_s: float, paused: Callable[[Member], bool]) -> None:
        self._pool, self._limit_s, self._paused = pool, hang_timeout_s, paused
        self._every_s = hang_timeout_s / _PROBES
        self._probes: dict[Member, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Probe all engines, including those that join later; never returns."""
        try:
            while True:
                for member in self._pool.serving:
                    if member not in self._probes:
                        self._probes[member] = asyncio.create_task(self._follow(member))
                for member in [member for member, task in self._probes.items() if task.done()]:
                    self._probes.pop(member).result()
                await asyncio.sleep(_POLL_S)
        finally:
            for task in self._probes.values():
                task.cancel()
            await asyncio.gather(*self._probes.values(), return_exceptions=True)

    async def _follow(self, member: Member) -> None:
        failed = 0
        while member in self._pool.serving:
            begin = time.monotonic()
            if self._paused(member):
                failed = 0
                await asyncio.sleep(_POLL_S)
                continue
            alive = await member.engine.client.alive(self._every_s)
            if alive:
                member.suspect = False
            if alive or member.heard > begin or self._paused(member):
                failed = 0
            else:
                # Probes are counted, not seconds: if this process itself stands still, each engine fails one probe, not all.
                failed, member.suspect = failed + 1, True
                if failed >= _PROBES - 1:
                    await self._fence(member, failed * self._every_s)
                    return
            await asyncio.sleep(max(0.0, begin + self._every_s - time.monotonic()))

    async def _fence(self, member: Member, silent: float) -> None:
        self._pool.fence(member, f"no token for {silent:.0f} s (engines.hang_timeout_s {self._limit_s:g})")
        # Its machine may hang too and never receive the order to end; the requests must not wait for that.
        await member.engine.client.close()
