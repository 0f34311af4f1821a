"""Versions of an adapter in a running engine take two slots in turn, so that no request waits for an exchange.

A request names the adapter of the version that was current when it was sent, and keeps it to its end: SGLang binds a request to an adapter
when it takes it in. Requests of the version before finish with theirs while new ones get the new one. The version after that goes where
the older of the two was, once nothing uses it: the trainer waits for that, never a request.

So a response is of one version. What SGLang reports as a token's weight_version is that of the base weights, which an adapter does not
change; of adapters it reports nothing. It keeps prefixes of different adapters apart by itself (`Req.extra_key` ends in the adapter's id).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from asyncmoe.errors import EngineError, WaitTimeout, WeightSyncError
from asyncmoe.rollout.engines.adapters import BASE, SLOTS
from asyncmoe.rollout.engines.engine_client import AdapterMessage, Generation, VersionSpan


class StillInUse(WaitTimeout):
    """Responses of an older version did not end in time; the engine was asked for nothing."""


class AdapterHost(Protocol):
    """What is needed of an `EngineClient`."""

    name: str

    async def load_adapter(self, name: str, adapter: Path | AdapterMessage, timeout_s: float) -> None: ...

    async def unload_adapter(self, name: str, timeout_s: float) -> None: ...


@dataclass(frozen=True)
class ServedBy:
    """What a request is sampled by.

    Attributes:
        version: of the weights.
        adapter: what the request names; None: nothing, the base alone is that version.
    """

    version: int
    adapter: str | None


@dataclass
class _Slot:
    """A place for a version.

    Attributes:
        serving: the one it holds, if any.
        users: requests under way with it.
        free: set while there are none.
    """

    serving: ServedBy | None = None
    users: int = 0
    free: asyncio.Event = field(default_factory=asyncio.Event)


class TwoSlots:
    """The versions one engine serves. It starts with version 0, the base without an adapter.

    Args:
        timeout_s: bound of each call to the engine, and of the wait for responses of an older version.
    """

    def __init__(self, server: AdapterHost, timeout_s: float) -> None:
        self._server, self._timeout_s = server, timeout_s
        self._slots = tuple(_Slot() for _ in range(SLOTS))
        for slot in self._slots:
            slot.free.set()
        self._current = self._slots[0]
        self._current.serving = self._serving = ServedBy(0, None)
        self._exchanging = asyncio.Lock()

    @property
    def serving(self) -> ServedBy:
        """What new requests are sampled by."""
        return self._serving

    @contextmanager
    def use(self) -> Iterator[ServedBy]:
        """For the time of one request: its version stays loaded."""
        slot = self._current
        slot.users += 1
        slot.free.clear()
        try:
            yield self._serving
        finally:
            slot.users -= 1
            if not slot.users:
                slot.free.set()

    async def publish(self, version: int, adapter: Path | AdapterMessage) -> None:
        """Have new requests sampled by a version; returns when they are.

        Args:
            version: above those before it; or 0 as the first, where training starts from an adapter.
            adapter: from `write` or `message`; as for `EngineClient.load_adapter`.

        Raises:
            WeightSyncError: a version out of turn. New requests still get the version before it.
            StillInUse: new requests still get the version before; calling again may succeed.
            EngineError, WaitTimeout: the engine refused or did not answer. Some of its ranks may hold the version: fence it.
        """
        async with self._exchanging:
            started = self._serving.adapter is not None
            if version < 0 or (started and version <= self._serving.version):
                raise WeightSyncError(f"{self._server.name}: adapter of version {version} after that of version {self._serving.version}")
            slot = await self._vacated()
            serving = ServedBy(version, f"v{version}")
            await self._server.load_adapter(f"v{version}", adapter, self._timeout_s)
            slot.serving = self._serving = serving
            self._current = slot

    async def _vacated(self) -> _Slot:
        """The slot that is not current, emptied."""
        (slot,) = (slot for slot in self._slots if slot is not self._current)
        if slot.serving is not None:
            await self._unused(slot, slot.serving)
            adapter, slot.serving = slot.serving.adapter, None
            if adapter is not None:
                await self._server.unload_adapter(adapter, self._timeout_s)
        return slot

    async def _unused(self, slot: _Slot, held: ServedBy) -> None:
        try:
            await asyncio.wait_for(slot.free.wait(), self._timeout_s)
        except TimeoutError:
            what = f"the end of {slot.users} responses of version {held.version}, whose slot the next one needs"
            raise StillInUse(self._server.name, what, self._timeout_s) from None


def attributed(generation: Generation, serving: ServedBy) -> Generation:
    """A response with the version of the adapter it was sampled with in place of what the engine says.

    Raises:
        EngineError: the engine's base weights are no longer the checkpoint's.
    """
    if any(span.version != BASE for span in generation.spans):
        raise EngineError(f"base weights of version {generation.spans[-1].version} under an adapter, expected those of version {BASE}")
    return replace(generation, spans=(VersionSpan(str(serving.version), 0, len(generation.tokens)),))
