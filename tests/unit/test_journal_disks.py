"""The payload store on disks that are full, read-only, removed, failing, slow or gone."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.errors import DataError, InvariantBroken, StorageError, WaitTimeout
from asyncmoe.journal import payload_writer, segments
from asyncmoe.journal.segments import Place, Segments
from tests.disks import mounted
from tests.unit.journal_stores import keep, opened, payload, stored


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(tmp_path / "disk", "1m") as place:
        yield place


async def outcomes(store: Segments, sizes: list[int]) -> list[Place | BaseException]:
    """Payloads that are kept at once, and what became of each."""
    tasks = (keep(store, [payload(number, size)]) for number, size in enumerate(sizes))
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)


def test_a_full_disk_keeps_what_was_durable_and_goes_on_after_there_is_room(disk: Path) -> None:
    store = opened(disk / "store", segment_bytes=100_000)
    first = asyncio.run(outcomes(store, [40_000] * 10))
    assert all(isinstance(one, Place) for one in first)
    last = asyncio.run(outcomes(store, [40_000] * 30))
    failed = [one for one in last if isinstance(one, StorageError)]
    assert failed
    assert all("No space left on device (ENOSPC)" in str(one) and "make room there" in str(one) for one in failed)
    with pytest.raises(StorageError, match="ENOSPC"):
        store.append([b""])
    with pytest.raises(StorageError, match="ENOSPC"):
        asyncio.run(store.room(0))
    places = [(number, one) for ended in (first, last) for number, one in enumerate(ended) if isinstance(one, Place)]
    assert all(store.read(place) == payload(number, 40_000) for number, place in places)
    store.close()
    with closing(opened(disk / "store")) as again:
        assert again.torn > 0, "what was torn makes room"
    fill(disk)
    with pytest.raises(StorageError, match=r"No space left on device \(ENOSPC\)"):
        opened(disk / "store")
    (disk / "filler").unlink()
    with closing(opened(disk / "store", segment_bytes=100_000)) as again:
        assert all(again.read(place) == payload(number, 40_000) for number, place in places)
        assert again.retain([]) > 400_000
        asyncio.run(keep(again, [bytes(40_000)]))


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_read_only_disk_is_named_before_anything_starts(disk: Path) -> None:
    stored(disk / "store", [5])
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StorageError, match=r"journal: cannot write .*Read-only file system \(EROFS\)"):
        opened(disk / "store")
    with pytest.raises(StorageError, match="EROFS"):
        opened(disk / "new" / "store")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EBADF])
@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "rename"])
def test_an_error_of_the_disk_reaches_all_who_wait_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    store = opened(tmp_path / "store", segment_bytes=500)
    before = asyncio.run(keep(store, [b"before"]))
    calls = []

    def fail(*_: Any, **__: Any) -> None:
        calls.append(call)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    ended = asyncio.run(outcomes(store, [100] * 10))
    broken = [one for one in ended if not isinstance(one, Place)]
    assert len(broken) == 10 if call != "rename" else len(broken) >= 6
    assert {type(one) for one in broken} == {StorageError}
    assert all(os.strerror(number) in str(one) and str(tmp_path / "store") in str(one) for one in broken)
    assert calls == [call]
    monkeypatch.undo()
    for refused in (lambda: store.append([b"after"]), lambda: asyncio.run(store.room(1))):
        with pytest.raises(StorageError):
            refused()
    asyncio.run(store.durable(before))
    store.close()
    with closing(opened(tmp_path / "store")) as again:
        assert again.read(before) == b"before"


def test_closing_says_what_nobody_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    store = opened(tmp_path / "store")
    store.append([b"nobody waits"])
    with pytest.raises(StorageError, match="EIO"):
        store.close()
    store.close()
    opened(tmp_path / "store").close()


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        return write(fd, [b"".join(buffers)[:7]], offset)

    monkeypatch.setattr(os, "pwritev", some)
    with closing(opened(tmp_path / "store")) as store:
        places = [asyncio.run(keep(store, [payload(number, size), b"", b"end"])) for number, size in enumerate((0, 1, 6, 7, 300))]
        assert [store.read(place) for place in places] == [payload(number, size) + b"end" for number, size in enumerate((0, 1, 6, 7, 300))]


def test_a_removed_folder_is_seen(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", segment_bytes=200)
    place = asyncio.run(keep(store, [b"here"]))
    shutil.rmtree(tmp_path / "store")
    (error,) = asyncio.run(outcomes(store, [10]))
    assert isinstance(error, StorageError)
    assert "was deleted while it was written" in str(error)
    with pytest.raises(DataError, match="No such file"):
        store.read(place)
    store.close()
    store = opened(tmp_path / "store", segment_bytes=200)
    shutil.rmtree(tmp_path / "store")
    ended = asyncio.run(outcomes(store, [150, 150]))
    assert all(isinstance(error, StorageError) for error in ended)
    store.close()


class SlowDisk:
    """A disk whose calls wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.go, self.reached, self.calls = threading.Event(), threading.Event(), 0
        real = getattr(os, call)

        def wait(*arguments: Any) -> Any:
            self.calls += 1
            self.reached.set()
            assert self.go.wait(20)
            return real(*arguments)

        monkeypatch.setattr(os, call, wait)


def test_a_slow_disk_stops_no_event_loop_and_one_sync_serves_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loop itself waited for the disk, nobody would let it go."""
    disk = SlowDisk(monkeypatch, "fdatasync")

    async def run(store: Segments) -> None:
        waiting = [asyncio.ensure_future(keep(store, [payload(number, 100)])) for number in range(300)]
        assert await asyncio.to_thread(disk.reached.wait, 10)
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        disk.go.set()
        await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)

    with closing(opened(tmp_path / "store")) as store:
        asyncio.run(run(store))
    assert disk.calls <= 3


def taken_of(store: Segments) -> int:
    """How many empty payloads a store takes before it refuses one."""
    for taken in range(10_000):
        try:
            store.append([])
        except StorageError:
            return taken
    return 10_000


def test_unwritten_bytes_are_bounded_and_room_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_writer, "MOST_UNWRITTEN", 100_000)
    disk = SlowDisk(monkeypatch, "pwritev")
    disk.go.set()
    store = opened(tmp_path / "store")
    disk.go.clear()

    async def run() -> None:
        store.append([bytes(500_000)])
        with pytest.raises(StorageError, match=r"expected at most .* not yet written; wait for `room`"):
            store.append([b"x"])
        waiting = [asyncio.ensure_future(keep(store, [bytes(60_000)])) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        disk.go.set()
        await asyncio.wait_for(asyncio.gather(*waiting), 20)
        disk.go.clear()
        assert taken_of(store) < 100, "an empty payload takes memory too"
        disk.go.set()

    asyncio.run(run())
    store.close()


def test_closing_brings_to_the_disk_what_others_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch, "fdatasync")
    store = opened(tmp_path / "store")

    async def run() -> None:
        waiting = [asyncio.ensure_future(keep(store, [payload(number, 100)])) for number in range(20)]
        while not disk.reached.is_set():
            await asyncio.sleep(0.001)
        ending = asyncio.create_task(asyncio.to_thread(store.close))
        await asyncio.sleep(0.05)
        with pytest.raises(InvariantBroken):
            store.append([b"late"])
        disk.go.set()
        await asyncio.wait_for(asyncio.gather(ending, *waiting), 20)

    asyncio.run(run())


def test_a_disk_that_never_answers_ends_the_wait_and_keeps_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_CLOSE_S", 0.1)
    disk = SlowDisk(monkeypatch, "fdatasync")
    store = opened(tmp_path / "store")

    async def run() -> None:
        waiting = asyncio.ensure_future(keep(store, [b"never"]))
        while not disk.reached.is_set():
            await asyncio.sleep(0.001)
        with pytest.raises(WaitTimeout, match="the journal's disk"):
            store.close()
        with pytest.raises(StorageError, match="waited"):
            await asyncio.wait_for(waiting, 20)

    asyncio.run(run())
    with pytest.raises(Exception, match=f"process {os.getpid()}"):
        opened(tmp_path / "store")
    disk.go.set()


def test_a_waiter_whose_event_loop_is_gone_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch, "fdatasync")
    with closing(opened(tmp_path / "store")) as store:
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(keep(store, [b"left"]), 0.05))
        disk.go.set()
        asyncio.run(asyncio.wait_for(keep(store, [b"there"]), 20))
