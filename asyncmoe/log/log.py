"""One sequence of records of one writer, at positions that ascend: appended without waiting, durable in order.

A thread writes what was appended, in batches, and makes it durable once for all that wait. What nobody waits for is durable a second later.
No decision depends on a clock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Annotated

import msgspec

from asyncmoe.errors import AsyncmoeError, InvariantBroken, StorageError, WaitTimeout, gibibytes
from asyncmoe.trajectory import Buffer

log = logging.getLogger(__name__)
LOST = "bring back a copy of the whole log from after the run's stop, or delete it: what was queued is then sampled again"
HEAD_BYTES = 16
"""What a record takes besides its bytes."""
MOST_UNWRITTEN = 256 << 20
_BATCH_BYTES = 64 << 20
_SYNC_S, _CLOSE_S = 1.0, 300.0

Record = tuple[int, list[memoryview]]
"""Position, and the parts of the bytes."""
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Also a rollout worker's message has a place."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a payload lies: number of the process that wrote it, and position in its log."""

    writer: Number
    position: Number


class Log(ABC):
    """A log that this process writes. `append`, `read_at` and `forget` may be called from any thread.

    Args:
        name: for messages.
        end: position of the next record.
        size: bytes that are kept.
        max_bytes: bound on them; None: none.

    Attributes:
        end, size: as above; what is not yet written counts.
        cpu_s: CPU seconds that its thread has taken.
        damaged: `read` has found that records are lost.
    """

    def __init__(self, name: str, end: int = 0, size: int = 0, max_bytes: int | None = None) -> None:
        self.name, self.cpu_s, self.damaged, self._max_bytes = name, 0.0, False, max_bytes
        self._changed = threading.Condition()
        self.end = self._written = self._durable = end
        self.size, self._unwritten = size, 0
        self._queue: deque[Record] = deque()
        self._waiting: list[tuple[int, Future[None]]] = []
        self._failure: AsyncmoeError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="log", daemon=True)

    def is_full(self, nbytes: int) -> bool:
        """Whether a record of so many bytes would exceed the bound."""
        return self._max_bytes is not None and self.size + nbytes + HEAD_BYTES > self._max_bytes

    async def room(self, nbytes: int) -> None:
        """Wait until no more bytes wait to be written than should. Raises as `append`."""
        self._check(nbytes)
        if self._unwritten and self._unwritten + nbytes > MOST_UNWRITTEN:
            await self.durable(self.end - 1)

    def append(self, parts: Sequence[Buffer]) -> int:
        """Hand over a record and return its position. Never waits.

        Args:
            parts: joined, its bytes; nobody may change them before it is durable.

        Raises:
            StorageError: the log is full, or has failed.
            UserError: another writer has taken over.
        """
        views = [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]
        nbytes = sum(map(len, views))
        with self._changed:
            self._check(nbytes)
            position = self.end
            self._queue.append((position, views))
            self.end += nbytes + HEAD_BYTES
            self.size += nbytes + HEAD_BYTES
            self._unwritten += nbytes + HEAD_BYTES
            self._changed.notify()
        return position

    async def durable(self, position: int) -> None:
        """Wait until the record at a position and all before it are durable. Raises as `append`."""
        with self._changed:
            if position < self._durable:
                return
            self._check()
            done: Future[None] = Future()
            self._waiting.append((position, done))
            self._changed.notify()
        await asyncio.wrap_future(done)

    def close(self) -> None:
        """Make everything durable and let go of the log. Blocks; a second call does nothing.

        Raises:
            WaitTimeout: the disk or server did not answer.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                raise WaitTimeout(self.name, "what was appended to be written", _CLOSE_S)
            log.info("%s: %d bytes are kept, %.2f s of CPU time", self.name, self.size, self.cpu_s)
        self._let_go()

    # ------------------------------------------------------------ a backend's

    @abstractmethod
    def read(self) -> Iterator[tuple[int, Buffer]]:
        """Yield position and bytes of each whole record that was there at the opening. What is damaged is logged in a line."""

    @abstractmethod
    def read_at(self, position: int, writer: str | None = None) -> Buffer:
        """Return the bytes of a durable record, perhaps of another writer. Blocks. Raises DataError if it is damaged or absent."""

    @abstractmethod
    def forget(self, below: int) -> int:
        """Let go of the records before a position, as far as whole segments have no other; return the freed bytes. Raises StorageError."""

    @abstractmethod
    def _write(self, batch: Sequence[Record]) -> None:
        """Write records, in order."""

    @abstractmethod
    def _sync(self) -> None:
        """Make durable what is written."""

    @abstractmethod
    def _explained(self, error: Exception) -> AsyncmoeError:
        """Return the error for the user."""

    @abstractmethod
    def _let_go(self) -> None:
        """Let another process write the log. May be called twice."""

    # ------------------------------------------------------------ internals

    def _check(self, nbytes: int = 0) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise InvariantBroken(f"{self.name} was used after it was closed")
        if nbytes and self.is_full(nbytes):
            hint = "raise it, or lower trainer.checkpoint_every: what a checkpoint covers is deleted"
            got = f"{gibibytes(self.size)} in {self.name} and {gibibytes(nbytes)} more"
            raise StorageError(f"log.max_bytes: got {got}, expected at most {gibibytes(self._max_bytes or 0)}; {hint}")

    def _serve(self) -> None:
        try:
            while self._serve_once():
                self.cpu_s = time.thread_time()
        except Exception as error:  # noqa: BLE001  raised by every later call
            self._fail(error if isinstance(error, AsyncmoeError) else self._explained(error))

    def _serve_once(self) -> bool:
        with self._changed:
            self._changed.wait_for(self._has_work, _SYNC_S if self._durable < self._written else None)
            batch, nbytes = list[Record](), 0
            while self._queue and (not batch or nbytes < _BATCH_BYTES):
                batch.append(self._queue.popleft())
                nbytes += sum(map(len, batch[-1][1])) + HEAD_BYTES
            ends = self._closing and not self._queue
        if batch:
            self._write(batch)
        with self._changed:
            self._written += nbytes
            self._unwritten -= nbytes
            due = not batch or ends or any(position < self._written for position, _ in self._waiting)
        if due and self._durable < self._written:
            self._sync()
            with self._changed:
                self._durable = self._written
                done = [future for position, future in self._waiting if position < self._durable]
                self._waiting = [one for one in self._waiting if one[0] >= self._durable]
            for future in done:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)
        return not ends

    def _has_work(self) -> bool:
        return bool(self._queue or self._waiting or self._closing)

    def _fail(self, error: AsyncmoeError) -> None:
        with self._changed:
            self._failure = self._failure or error
            waiting, self._waiting = self._waiting, []
            self._queue.clear()
        log.error("%s", error)
        for _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
