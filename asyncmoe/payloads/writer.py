"""Puts groups into the store of a run."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial

import msgspec

from asyncmoe.errors import StorageError
from asyncmoe.payloads.store import GroupStore
from asyncmoe.queue.group_buffer import Group

_AT_ONCE = 4
"""Groups that one process puts at the same time."""
_END_S = 10.0
"""Seconds for which the end of what is being put is waited for."""


class GroupWriter:
    """For one event loop, in a process that makes groups.

    Args:
        prefix: what `GroupStore.begin` returned to the controller.
    """

    def __init__(self, store: GroupStore, prefix: str) -> None:
        self._store, self._prefix = store, f"{prefix}{uuid.uuid4().hex[:12]}."
        self._count = 0
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._putting: set[Future[None]] = set()

    async def put(self, group: Group) -> Group:
        """Put a group into the store, and return it without its frames. Raises as `GroupStore.put`.

        The time that a group waits for its turn counts as time that it waits for room.
        """
        full_s = self._store.full_s
        stored, self._count, until = f"{self._prefix}{self._count}", self._count + 1, time.monotonic() + full_s
        try:
            await asyncio.wait_for(self._room.acquire(), full_s)
        except TimeoutError as error:
            said = f"payloads: the {_AT_ONCE} groups before this one were not put within {full_s:g} s (queue.lease_timeout_s)"
            raise StorageError(f"{said}; see the store's log, raise that, or lower queue.capacity") from error
        try:
            await asyncio.wrap_future(self._start(stored, group, until))
        finally:
            self._room.release()
        return replace(group, frames={}, items=tuple(msgspec.structs.replace(item, stored=stored) for item in group.items))

    def end(self) -> bool:
        """Put no more; return whether all that was being put has ended. Blocks, for a bounded time."""
        self._store.end()
        return not wait(list(self._putting), _END_S).not_done

    def close(self) -> None:
        """End what waits, and let go of the store. Blocks, for a bounded time."""
        self.end()
        self._store.close()

    def _start(self, stored: str, group: Group, until: float) -> Future[None]:
        future = Future[None]()
        self._putting.add(future)
        future.add_done_callback(self._putting.discard)
        # A daemon, as the process must be able to end while a store never answers.
        threading.Thread(target=partial(self._put, future, stored, group, until), name=f"put {stored}", daemon=True).start()
        return future

    def _put(self, future: Future[None], stored: str, group: Group, until: float) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._store.put(stored, group.frames, until)
        except BaseException as error:  # noqa: BLE001  passed to who awaits it
            future.set_exception(error)
        else:
            future.set_result(None)
