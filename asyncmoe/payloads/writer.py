"""Puts groups into the store of a run."""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from asyncmoe.payloads.store import GroupStore
from asyncmoe.queue.group_buffer import Group

_AT_ONCE = 4
"""Groups that one process puts at the same time."""


class GroupWriter:
    """For one event loop, in a process that makes groups.

    Args:
        prefix: what `GroupStore.begin` returned to the controller.
    """

    def __init__(self, store: GroupStore, prefix: str) -> None:
        self._store, self._prefix = store, f"{prefix}{uuid.uuid4().hex[:12]}."
        self._count = 0
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="payloads")

    async def put(self, group: Group) -> Group:
        """Put a group into the store, and return it without its frames. Raises as `GroupStore.put`."""
        stored, self._count = f"{self._prefix}{self._count}", self._count + 1
        await asyncio.get_running_loop().run_in_executor(self._threads, self._store.put, stored, group.frames)
        return replace(group, frames={}, items=tuple(msgspec.structs.replace(item, stored=stored) for item in group.items))

    def close(self) -> None:
        """End what waits, and let go of the store. Blocks."""
        self._store.close()
        self._threads.shutdown(cancel_futures=True)
