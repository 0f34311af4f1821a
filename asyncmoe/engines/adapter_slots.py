"""Versions of an adapter in a running engine alternate between two slots, so that no request waits for a swap.

A request names the adapter of the version that was current when it was sent, and keeps it to its end: SGLang binds a request to an adapter
on arrival. Requests of the previous version finish with it while new requests use the new version. The next version takes the slot of the
older version once no request uses its adapter: the trainer waits for this, never a request.

So a response has exactly one version. The weight_version that SGLang reports for a token is the version of the base weights, which an
adapter does not change; SGLang reports no version of adapters. It separates the cached prefixes of different adapters itself
(`Req.extra_key` ends in the adapter's id).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from asyncmoe.engines.adapters import BASE, SLOTS
from asyncmoe.engines.engine import AdapterHost
from asyncmoe.engines.types import Generation, VersionSpan
from asyncmoe.errors import EngineError, WaitTimeout, WeightSyncError

_LOOK_S = 0.05


class StillInUse(WaitTimeout):
    """Responses of an older version did not end in time; the engine received no call."""


@dataclass(frozen=True)
class ServedBy:
    """The version that samples a request.

    Attributes:
        version: version of the weights.
        adapter: name of the adapter in the request; None: the base model alone is that version.
        lineage: of the version; see `asyncmoe.engines.pool.Pool`.
    """

    version: int
    adapter: str | None
    lineage: int = 0

    @property
    def salt(self) -> str:
        """The salt of prefixes that this version computes: one version of two lineages has other weights in each."""
        return str(self.version) if not self.lineage else f"{self.version}.{self.lineage}"


@dataclass
class _Slot:
    """A slot for one version. `serving`: the version it holds, or None."""

    serving: ServedBy | None = None


class TwoSlots:
    """The versions one engine serves. It starts with version 0, the base model without an adapter.

    Attributes:
        loading: True while the engine loads a version; SGLang samples nothing meanwhile.

    Args:
        timeout_s: limit on each call to the engine, and on the wait for responses of an older version.
        in_use: says whether a request in progress, or one to come, uses an adapter that is not the current one; None: the base model alone,
            which takes a place in SGLang's batch as an adapter does.
    """

    loading = False

    def __init__(self, server: AdapterHost, timeout_s: float, in_use: Callable[[str | None], Awaitable[bool]]) -> None:
        self._server, self._timeout_s, self._in_use = server, timeout_s, in_use
        self._slots = tuple(_Slot() for _ in range(SLOTS))
        self._current = self._slots[0]
        self._current.serving = self._serving = ServedBy(0, None)
        self._exchanging = asyncio.Lock()

    @property
    def serving(self) -> ServedBy:
        """The version that samples new requests."""
        return self._serving

    async def publish(self, version: int, folder: Path, lineage: int = 0) -> None:
        """Switch new requests to a version; returns when the switch is done.

        Args:
            version: higher than every earlier version of its lineage; or 0 as the first, if training starts from an adapter.
            lineage: at least that of every earlier version.
            folder: as for `AdapterHost.load_adapter`.

        Raises:
            WeightSyncError: the version is out of order. New requests still use the previous version.
            StillInUse: new requests still use the previous version; a retry may succeed.
            EngineError, WaitTimeout: the engine refused or did not answer. Some of its ranks may hold the version: fence the engine.
        """
        async with self._exchanging:
            started, now = self._serving.adapter is not None, self._serving
            if version < 0 or (started and (lineage, version) <= (now.lineage, now.version)):
                expected = f"above {self._serving.version}" if started else "at least 0"
                raise WeightSyncError(f"{self._server.name}: got adapter version {version}, expected {expected}")
            slot = await self._vacated()
            serving = ServedBy(version, f"v{ServedBy(version, None, lineage).salt}", lineage)
            self.loading = True
            try:
                await self._server.load_adapter(serving.adapter or "", folder, self._timeout_s)
            finally:
                self.loading = False
            slot.serving = self._serving = serving
            self._current = slot

    async def _vacated(self) -> _Slot:
        """Empty the slot that is not current, and return it."""
        (slot,) = (slot for slot in self._slots if slot is not self._current)
        if (held := slot.serving) is not None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    while await self._in_use(held.adapter):
                        await asyncio.sleep(_LOOK_S)
            except TimeoutError:
                what = f"the end of all responses of version {held.version}, whose slot the next one needs"
                raise StillInUse(self._server.name, what, self._timeout_s) from None
            slot.serving = None
            if held.adapter is not None:
                await self._server.unload_adapter(held.adapter, self._timeout_s)
        return slot


def attributed(generation: Generation, serving: ServedBy) -> Generation:
    """Return a response with its adapter's version in place of the version the engine reports.

    Raises:
        EngineError: the engine's base weights are no longer the checkpoint's.
    """
    if any(span.version != BASE for span in generation.spans):
        raise EngineError(f"got base weights of version {generation.spans[-1].version} under an adapter, expected version {BASE}")
    return replace(generation, spans=(VersionSpan(str(serving.version), 0, len(generation.tokens)),))
