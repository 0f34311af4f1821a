"""What puts groups into a store waits for a bounded time only, whatever the store does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Mapping, Sequence

import pytest

from asyncmoe.errors import StorageError
from asyncmoe.payloads import writer as writing
from asyncmoe.payloads.packed import Asked
from asyncmoe.payloads.store import Found
from asyncmoe.payloads.writer import GroupWriter
from asyncmoe.queue.group_buffer import Group
from asyncmoe.trajectory import Buffer


class Stuck:
    """A store that takes nothing until it is let go."""

    def __init__(self, full_s: float) -> None:
        self.full_s, self.until = full_s, list[float | None]()
        self.let_go, self.putting = threading.Event(), threading.Semaphore(0)

    def begin(self, run: str) -> str:
        return f"{run}:"

    def put(self, stored: str, frames: Mapping[str, Sequence[Buffer]], until: float | None = None) -> None:
        self.until.append(until)
        self.putting.release()
        self.let_go.wait()

    def get(self, asked: Sequence[Asked]) -> Found:
        return []

    def delete(self, stored: Sequence[str]) -> None: ...

    def sweep(self, prefix: str, live: Collection[str]) -> int:
        return 0

    def clear(self, prefix: str) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


def test_closing_does_not_wait_for_a_store_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_END_S", 0.05)
    store = Stuck(60.0)
    writer = GroupWriter(store, "run:")

    async def run() -> None:
        putting = asyncio.create_task(writer.put(Group(0, (), {})))
        await asyncio.to_thread(store.putting.acquire)
        closing = threading.Thread(target=writer.close, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, 10)
        assert not closing.is_alive()
        assert not putting.done()
        store.let_go.set()
        await putting
        assert writer.end()

    asyncio.run(run())


def test_a_group_that_waits_for_its_turn_has_no_more_time_than_another() -> None:
    store = Stuck(60.0)
    writer = GroupWriter(store, "run:")

    async def run() -> None:
        puts = [asyncio.create_task(writer.put(Group(0, (), {}))) for _ in range(writing._AT_ONCE + 1)]
        for _ in range(writing._AT_ONCE):
            await asyncio.to_thread(store.putting.acquire)
        all_asked = time.monotonic()
        store.let_go.set()
        await asyncio.gather(*puts)
        assert all(until is not None and until <= all_asked + store.full_s for until in store.until)
        assert len(store.until) == len(puts)

    asyncio.run(run())


def test_a_group_whose_turn_does_not_come_is_given_up() -> None:
    store = Stuck(0.1)
    writer = GroupWriter(store, "run:")

    async def run() -> None:
        puts = [asyncio.create_task(writer.put(Group(0, (), {}))) for _ in range(writing._AT_ONCE)]
        for _ in puts:
            await asyncio.to_thread(store.putting.acquire)
        with pytest.raises(StorageError, match=r"payloads: the 4 groups before .* within 0.1 s \(queue.lease_timeout_s\)") as failed:
            await writer.put(Group(0, (), {}))
        assert "\n" not in str(failed.value)
        store.let_go.set()
        await asyncio.gather(*puts)
        await writer.put(Group(0, (), {}))

    asyncio.run(run())
