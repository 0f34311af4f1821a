"""One writer's sequence of records, at ascending positions: appended without waiting, made durable in order.

A thread writes appended records in batches, and syncs once for all callers that wait. A record that nobody waits for is durable a second
later. No decision depends on a clock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import reduce
from typing import Annotated, Protocol, TypeVar

import msgspec

from asyncmoe.errors import AsyncmoeError, InvariantBroken, StorageError, WaitTimeout, gibibytes
from asyncmoe.trajectory import Buffer
from asyncmoe.trajectory.native import crc32c

log = logging.getLogger(__name__)
T = TypeVar("T")
LOST = "restore a copy of the whole log made after the run stopped, or delete the log: queued groups are then sampled again"
HEAD_BYTES = 16
"""Bytes of a record besides its payload."""
_SYNC_S, _CLOSE_S = 1.0, 300.0

Record = tuple[int, list[memoryview]]
"""Position, and the parts of the payload."""
Found = tuple[int, int, memoryview | None]
"""Begin and end positions, and the bytes of the record between them; None: no whole record."""
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Bounded, because messages of rollout workers contain places too."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a payload lies: number of the process that wrote it, and position in that process's log."""

    writer: Number
    position: Number


def checksum(parts: Sequence[Buffer]) -> int:
    """Return the CRC-32C of the concatenated parts."""
    return reduce(lambda crc, part: crc32c(part, crc), parts, 0)


class Reader(Protocol):
    """Reads the logs of a run, by name of their writers, also while these write. Takes no lock, displaces no writer, changes nothing."""

    def found(self, writer: str) -> Iterator[Found]:
        """Yield records and damaged ranges of a log, in order; the last range may be a record that is being written. Raises DataError."""

    def read_at(self, position: int, writer: str) -> Buffer:
        """Return the bytes of a durable record. Raises DataError if it is damaged or absent."""

    def spans(self, writer: str) -> list[tuple[int, int]]:
        """Return begin and end of the ranges of positions that are kept, ascending. Reads no record."""


class Log(ABC):
    """A log that this process writes. `append`, `read_at` and `forget` may be called from any thread.

    Args:
        name: the log's name, for messages.
        reader: of the run's logs.
        writer: name of this one.
        end: position of the next record.
        size: bytes stored.
        max_bytes: bound on `size`; None: no bound.

    Attributes:
        end, size: as above, including what is not written yet.
        damaged: whether `read` found that records are lost.
    """

    def __init__(self, name: str, reader: Reader, writer: str, end: int, size: int, max_bytes: int | None) -> None:
        self._reader, self._writer = reader, writer
        self.name, self.damaged, self._max_bytes = name, False, max_bytes
        self.end = self._durable = self._opened = end
        self.size = size
        self._changing, self._queue = threading.Lock(), list[Record]()
        self._failure: AsyncmoeError | None = None
        self._over = threading.Event()
        self._turns = ThreadPoolExecutor(1, "log")
        self._ticking = threading.Thread(target=self._tick, name="log ticks", daemon=True)
        self._ticking.start()

    def is_full(self, nbytes: int) -> bool:
        """Return whether a record of `nbytes` bytes would exceed the bound."""
        return self._max_bytes is not None and self.size + nbytes + HEAD_BYTES > self._max_bytes

    def read(self) -> Iterator[tuple[int, Buffer]]:
        """Yield position and bytes of each whole record present when the log was opened. Each damaged range is logged in one line."""
        for begin, end, data in self._reader.found(self._writer):
            if begin >= self._opened:
                return
            if data is not None:
                yield begin, data
            else:
                self.damaged = True
                log.error("%s is damaged: no record from position %d to %d can be read", self.name, begin, end)

    def read_at(self, position: int, writer: str | None = None) -> Buffer:
        """Return the bytes of a durable record, of any writer. Blocks. Raises DataError if it is damaged or absent."""
        return self._reader.read_at(position, writer or self._writer)

    def append(self, parts: Sequence[Buffer]) -> int:
        """Append a record and return its position. Never waits.

        Args:
            parts: parts of the payload, in order; nobody may change them before the record is durable.

        Raises:
            StorageError: the log is full, or has failed.
            UserError: another writer has taken over.
        """
        views = [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]
        nbytes = sum(map(len, views))
        with self._changing:
            self._check()
            if self.is_full(nbytes):
                hint = "raise it, or lower trainer.checkpoint_every: records that a checkpoint covers are deleted"
                got = f"{gibibytes(self.size)} in {self.name} and {gibibytes(nbytes)} more"
                raise StorageError(f"log.max_bytes: got {got}, expected at most {gibibytes(self._max_bytes or 0)}; {hint}")
            if not self._queue:
                self._turns.submit(self._acted, self._settle, -1)
            position = self.end
            self._queue.append((position, views))
            self.end += nbytes + HEAD_BYTES
            self.size += nbytes + HEAD_BYTES
        return position

    async def durable(self, position: int) -> None:
        """Wait until the record at a position and all before it are durable. Raises as `append`."""
        if position >= self._durable:
            self._check()
            await asyncio.get_running_loop().run_in_executor(self._turns, self._acted, self._settle, position)

    def forget(self, below: int) -> Future[int]:
        """Free the records before a position, as far as they fill whole segments; the future returns the bytes freed.

        If the deletion fails, the log can no longer be used.
        """
        return self._turns.submit(self._acted, self._forget, below)

    def close(self) -> None:
        """Make everything durable and release the log. Blocks; a second call does nothing.

        Raises:
            WaitTimeout: the disk or server did not answer.
        """
        if not self._over.is_set():
            self._over.set()
            last = self._turns.submit(self._acted, self._settle, self.end - 1)
            self._ticking.join()
            if wait([last], _CLOSE_S).not_done:
                raise WaitTimeout(self.name, "its appended records to be written", _CLOSE_S)
            log.info("%s: %d bytes are kept", self.name, self.size)
            self._let_go()

    # ------------------------------------------------------------ for backends

    @abstractmethod
    def _write(self, batch: Sequence[Record]) -> None:
        """Write records, in order. Raises StorageError, as do the next two."""

    @abstractmethod
    def _sync(self) -> None:
        """Make written records durable."""

    @abstractmethod
    def _forget(self, below: int) -> int:
        """See `forget`; subtract the freed bytes from `size` and return them."""

    @abstractmethod
    def _let_go(self) -> None:
        """Release the log to other processes."""

    @abstractmethod
    def _beat(self) -> None:
        """Renew what expires; called every second."""

    # ------------------------------------------------------------ internals

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._over.is_set():
            raise InvariantBroken(f"{self.name} was used after it was closed")

    def _tick(self) -> None:
        with suppress(AsyncmoeError):  # the log's failure, reported elsewhere
            while not self._over.wait(_SYNC_S):
                self._acted(self._beat)
                self._turns.submit(self._acted, self._settle, self.end - 1)

    def _acted(self, act: Callable[..., T], *arguments: int) -> T:
        """Run one of the log's operations, unless an earlier one failed. Raises the log's failure."""
        if self._failure is not None:
            raise self._failure
        try:
            return act(*arguments)
        except Exception as error:
            bug = InvariantBroken(f"{self.name}: {type(error).__name__}: {error}")
            self._failure = self._failure or (error if isinstance(error, AsyncmoeError) else bug)
            log.error("%s", self._failure)
            raise self._failure from error

    def _settle(self, position: int) -> None:
        """Write appended records, and sync if the record at a position is not durable yet."""
        with self._changing:
            batch, self._queue, end = self._queue, [], self.end
        if batch:
            self._write(batch)
        if self._durable <= position:
            self._sync()
            self._durable = end
