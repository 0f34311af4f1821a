"""Two threads that bring payloads to the disk: one writes, one syncs what is written, once for all that wait.

While a sync is under way the next payloads are written, so the disk is never idle, and everything written in the meantime is covered by the
next sync.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asyncmoe.errors import InvariantBroken, StorageError, WaitTimeout
from asyncmoe.journal.segment_folder import SegmentFolder, failure, write_all
from asyncmoe.journal.segment_format import HEAD_BYTES, HEADER_BYTES, Place, RecordHead, pack_head, seed_of
from asyncmoe.trajectory.native import crc32c

MOST_UNWRITTEN = 256 << 20
"""Bytes of payloads that may wait for the writing thread; a larger one may wait alone."""
_OVERHEAD = 1 << 10
"""What a payload that waits takes besides its bytes, roughly."""
_BATCH_BYTES = 8 << 20
_BATCH_RECORDS = 512

Position = tuple[int, int]
"""Segment, and offset of the first byte after a record."""
_Future = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


@dataclass(frozen=True)
class _Payload:
    place: Place
    parts: tuple[memoryview, ...]


class PayloadWriter:
    """Writes payloads to segments, one segment after the other. `put` and `close` are not called at the same time.

    Args:
        segment: number of the segment to begin with, which is new.

    Raises:
        StorageError: its file cannot be made.
    """

    def __init__(self, folder: SegmentFolder, writer: int, segment: int) -> None:
        self._folder, self._writer = folder, writer
        self._fd, self._seed = -1, 0
        self._begin_segment(segment)
        self._lock = threading.Lock()
        # Each thread is woken only for its own work: most payloads find both at work.
        self._to_write, self._to_sync = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queue: deque[_Payload] = deque()
        self._unwritten = 0
        self._written: Position = (segment, HEADER_BYTES)
        self._synced = self._written
        self._waiting: list[tuple[Position, int, _Future]] = []
        self._for_room: list[_Future] = []
        self._turns = itertools.count()
        self._segment_ends = self._closing = self._all_written = self._told = False
        self._failure: StorageError | None = None
        self._threads = [
            threading.Thread(target=self._watched, args=(step,), name=f"journal-{step.__name__.strip('_')}", daemon=True)
            for step in (self._write, self._sync)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def segment(self) -> int:
        """Number of the segment that is being written."""
        with self._lock:
            return self._written[0]

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes may wait to be written.

        Raises:
            StorageError: the disk failed.
            InvariantBroken: `close` was called.
        """
        with self._lock:
            return self._fits(nbytes)

    def _fits(self, nbytes: int) -> bool:
        self._check()
        if self._closing:
            raise InvariantBroken("a payload was appended to a closed journal")
        return not self._unwritten or self._unwritten + nbytes + _OVERHEAD <= MOST_UNWRITTEN

    async def room(self, nbytes: int) -> None:
        """Wait until `fits`, with its errors."""
        while True:
            with self._lock:
                if self._fits(nbytes):
                    return
                waiter = _future()
                self._for_room.append(waiter)
            await waiter[1]

    def put(self, place: Place, parts: Iterable[memoryview]) -> None:
        """Hand over a payload; those of lower places were handed over before."""
        with self._lock:
            if not self._queue:
                self._to_write.notify()
            self._queue.append(_Payload(place, tuple(parts)))
            self._unwritten += place.length + _OVERHEAD

    async def synced(self, position: Position) -> None:
        """Wait until everything before `position` is on disk.

        Raises:
            StorageError: the disk failed.
        """
        with self._lock:
            if self._synced >= position:
                return
            self._check()
            waiter = _future()
            heapq.heappush(self._waiting, (position, next(self._turns), waiter))
            if position <= self._written:
                self._to_sync.notify()
        await waiter[1]

    def close(self, timeout_s: float) -> None:
        """Bring everything to the disk and end the threads.

        Raises:
            StorageError: the disk failed, and nobody was told.
            WaitTimeout: the disk did not answer; the threads are left to it.
        """
        with self._lock:
            self._closing = True
            self._to_write.notify()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            slow = WaitTimeout("the journal's disk", f"payloads under {self._folder.path} to be written", timeout_s)
            self._fail(StorageError(str(slow)))
            raise slow
        self._close_segment()
        if self._failure is not None and not self._told:
            self._check()

    def _check(self) -> None:
        if self._failure is not None:
            self._told = True
            raise StorageError(str(self._failure)) from self._failure

    def _watched(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._fail(failure(error, self._folder.path_of(self._writer, self._written[0])))
        except StorageError as error:
            self._fail(error)
        except Exception as error:
            # Whoever waits for a dead thread waits for ever.
            self._fail(StorageError(f"journal: writing to {self._folder.path} failed: {error!r}"))
            raise

    def _fail(self, error: StorageError) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._queue.clear()
            waiting = [waiter for *_, waiter in self._waiting] + self._for_room
            self._waiting, self._for_room = [], []
            self._told = self._told or bool(waiting)
            self._to_write.notify()
            self._to_sync.notify()
        _wake(waiting, str(self._failure))

    def _write(self) -> None:
        while self._write_next():
            pass
        with self._lock:
            self._all_written = True
            self._to_sync.notify()

    def _write_next(self) -> bool:
        """Write the payloads that wait, as far as one call of the system should; return False if there will be no more."""
        batch = self._next_batch()
        if not batch:
            return False
        first, last = batch[0].place, batch[-1].place
        if first.segment != self._written[0]:
            self._end_segment()
            self._begin_segment(first.segment)
        buffers = [buffer for payload in batch for buffer in self._record(payload)]
        write_all(self._fd, buffers, first.offset)
        with self._lock:
            self._written = (last.segment, last.end)
            self._unwritten -= sum(payload.place.length + _OVERHEAD for payload in batch)
            woken, self._for_room = self._for_room, []
            self._to_sync.notify()
        _wake(woken)
        return True

    def _next_batch(self) -> list[_Payload]:
        """Wait for payloads; return some of one segment, or none if there will be no more."""
        with self._lock:
            self._to_write.wait_for(lambda: self._queue or self._closing or self._failure)
            batch: list[_Payload] = []
            nbytes = 0
            while self._queue and len(batch) < _BATCH_RECORDS:
                place = self._queue[0].place
                if batch and (place.segment != batch[0].place.segment or nbytes + place.length > _BATCH_BYTES):
                    break
                nbytes += place.length
                batch.append(self._queue.popleft())
            return batch

    def _record(self, payload: _Payload) -> list[memoryview]:
        place, digest = payload.place, 0
        padding = memoryview(bytes(place.end - place.offset - HEAD_BYTES - place.length))
        for part in (*payload.parts, padding):
            digest = crc32c(part, digest)
        head = pack_head(self._seed, place.offset, RecordHead(place.length, digest))
        return [memoryview(head), *payload.parts, *([padding] if padding else [])]

    def _end_segment(self) -> None:
        """Wait until the current segment is on disk: of all segments only the newest can be torn."""
        with self._lock:
            self._segment_ends = True
            self._to_sync.notify()
            self._to_write.wait_for(lambda: self._synced == self._written or self._failure)
            self._segment_ends = False
            if self._failure is not None:
                raise self._failure
        self._close_segment()

    def _begin_segment(self, segment: int) -> None:
        self._fd = self._folder.create(self._writer, segment)
        self._seed = seed_of(self._folder.identity, self._writer, segment)

    def _close_segment(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _sync(self) -> None:
        while True:
            with self._lock:
                self._to_sync.wait_for(lambda: self._failure or self._all_written or self._sync_is_due())
                if self._failure is not None or not self._sync_is_due():
                    return
                target = self._written
            os.fdatasync(self._fd)
            if not os.fstat(self._fd).st_nlink:
                raise StorageError(f"journal: {self._folder.path_of(self._writer, target[0])} was deleted while it was written")
            with self._lock:
                self._synced = target
                woken = []
                while self._waiting and self._waiting[0][0] <= target:
                    woken.append(heapq.heappop(self._waiting)[2])
                if self._segment_ends:
                    self._to_write.notify()
            _wake(woken)

    def _sync_is_due(self) -> bool:
        wanted = self._segment_ends or self._all_written or bool(self._waiting and self._waiting[0][0] <= self._written)
        return wanted and self._synced < self._written


def _future() -> _Future:
    loop = asyncio.get_running_loop()
    return loop, loop.create_future()


def _wake(waiters: list[_Future], error: str | None = None) -> None:
    """End the waiting in every event loop that still runs, with one wake-up each."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for loop, future in waiters:
        by_loop.setdefault(loop, []).append(future)
    for loop, futures in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, futures, error)
        except RuntimeError:
            if not loop.is_closed():
                raise


def _resolve(futures: list[asyncio.Future[None]], error: str | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(StorageError(error))
