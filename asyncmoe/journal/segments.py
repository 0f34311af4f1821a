"""Append-only, checksummed payload files with one writer, group commit and a bound on bytes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from asyncmoe.errors import DataError, InvariantBroken, StorageError, gibibytes
from asyncmoe.journal.payload_writer import MOST_UNWRITTEN, PayloadWriter
from asyncmoe.journal.segment_folder import SegmentFolder, make_folder, writing
from asyncmoe.journal.segment_format import HEADER_BYTES, Place, footprint, seed_of
from asyncmoe.journal.segment_scan import scan, whole_end
from asyncmoe.trajectory import Buffer

__all__ = ["Place", "Segments"]

log = logging.getLogger(__name__)

_CLOSE_S = 60.0
"""How long `close` waits for the disk."""


class Segments:
    """Payloads in the segment files of one folder.

    `append`, `read`, `retain` and `size` may be called from any thread, `room` and `durable` from any event loop.
    """

    def __init__(self, folder: SegmentFolder, sizes: dict[int, int], *, writer: int, segment_bytes: int, max_bytes: int, torn: int) -> None:
        """See `open`.

        Args:
            sizes: bytes of this writer's segments by number.
        """
        self._folder, self._number, self._torn = folder, writer, torn
        self._held = ExitStack()
        self._segment_bytes, self._max_bytes = segment_bytes, max_bytes
        self._first = self._newest = max(sizes, default=-1) + 1
        self._sizes = {**sizes, self._newest: HEADER_BYTES}
        self._size = sum(self._sizes.values())
        self._lock, self._deleting = threading.Lock(), threading.Lock()
        self._closed = False
        self._writer = PayloadWriter(folder, writer, self._newest)

    @classmethod
    def open(cls, folder: Path, identity: str, *, writer: int = 0, segment_bytes: int = 256 << 20, max_bytes: int) -> Segments:
        """Open the store of a folder for writing; make the folder (mode 0700) if it is absent.

        The bytes after the last whole record of the newest segment are cut off. A new segment is begun, so that a place never means two
        payloads. Blocks, for as long as it takes to read the newest segment.

        Args:
            identity: of run, model and seed; its SHA-256 is in every segment's header.
            segment_bytes: size from which a new segment is begun; a larger payload has a segment of its own.
            max_bytes: bound on all segments of this writer together.

        Raises:
            DataError: the segments have another identity or format, or the folder belongs to or is open to other users.
            UserError: another process writes to the folder; the error has its pid.
            StorageError: the folder cannot be written, or its file system has no locks.
        """
        if writer < 0:
            raise DataError("journal: number of the writer", got=writer, expected="0 or more")
        make_folder(folder)
        with ExitStack() as held:
            opened = SegmentFolder.open(folder, identity)
            held.callback(opened.close)
            held.callback(os.close, opened.lock(writer))
            opened.clear(writer)
            sizes = opened.sizes()
            damaged = {numbers for numbers in sizes if not opened.check(*numbers)}
            own = {segment: size for (number, segment), size in sizes.items() if number == writer}
            # Without a header nobody knows whose records they are: another store's would look torn.
            torn = 0 if (writer, max(own, default=0)) in damaged else _cut_tail(opened, writer, own)
            bounds = {"segment_bytes": segment_bytes, "max_bytes": max_bytes}
            store = cls(opened, own, writer=writer, **bounds, torn=torn)
            store._held = held.pop_all()
            return store

    async def room(self, nbytes: int) -> None:
        """Wait until `append` takes a payload of so many bytes; true until the caller's next `await`.

        Raises:
            StorageError: as `append`, except that it waits for bytes that are not yet written.
        """
        with self._lock:
            check_bound(self._size, footprint(nbytes), self._max_bytes)
        await self._writer.room(nbytes)

    def append(self, parts: Sequence[Buffer]) -> Place:
        """Hand a payload to the writer thread and return where it will lie. Never waits.

        Args:
            parts: joined, the payload. They are written as they are, so nobody may change them before `durable` has returned.

        Raises:
            StorageError: the disk failed before, the store would exceed `max_bytes` (journal.max_bytes; possible again after `retain`), or
                too many bytes are not yet written (`room` waits for that).
            InvariantBroken: the store is closed.
        """
        views = [view for part in parts if (view := memoryview(part)).nbytes]
        views = [view.cast("B") for view in views]
        length = sum(len(view) for view in views)
        nbytes = footprint(length)
        with self._lock:
            self._check_open()
            if not self._writer.fits(length):
                got = f"{gibibytes(length)} more than the disk of {self._folder.path} has taken"
                raise StorageError(f"journal: got {got}, expected at most {gibibytes(MOST_UNWRITTEN)} not yet written; wait for `room`")
            begun = self._sizes[self._newest]
            another = begun > HEADER_BYTES and begun + nbytes > self._segment_bytes
            check_bound(self._size, nbytes + another * HEADER_BYTES, self._max_bytes)
            if another:
                self._newest += 1
                self._sizes[self._newest] = HEADER_BYTES
                self._size += HEADER_BYTES
            place = Place(self._number, self._newest, self._sizes[self._newest], length)
            self._sizes[self._newest] += nbytes
            self._size += nbytes
            self._writer.put(place, views)
        return place

    async def durable(self, place: Place) -> None:
        """Wait until the payload is on disk; one fsync serves all that wait.

        Raises:
            StorageError: the disk failed. Every waiter gets it, and the store takes no more payloads.
            DataError: nothing was appended there.
        """
        if place.writer != self._number:
            raise DataError("journal payload", got=f"one of writer {place.writer}", expected=f"one of writer {self._number}")
        if place.segment < self._first:
            return
        with self._lock:
            appended = place.segment <= self._newest and place.end <= self._sizes.get(place.segment, 0)
        if not appended:
            got = f"segment {place.segment} offset {place.offset}, where nothing was appended"
            raise DataError("journal payload", got=got, expected="the place of a payload")
        await self._writer.synced((place.segment, place.end))

    def read(self, place: Place) -> bytearray:
        """Read a payload and verify its checksum. Blocks. A payload can be read once it is durable.

        Raises:
            DataError: damaged or absent; names file and offset.
            InvariantBroken: the store is closed.
        """
        self._check_open()
        return self._folder.read(place)

    def recorded(self) -> Iterator[Place]:
        """Find the whole payloads that the folder held when it was opened, in the order in which they were appended. Blocks.

        Raises:
            OSError: the disk failed.
        """
        for segment in sorted(number for number in self._sizes if number < self._first):
            fd = self._folder.open_segment(self._number, segment)
            try:
                for found in scan(fd, seed_of(self._folder.identity, self._number, segment)):
                    if found.whole and found.length is not None:
                        yield Place(self._number, segment, found.offset, found.length)
            finally:
                os.close(fd)

    def retain(self, live: Iterable[int], below: int | None = None) -> int:
        """Delete the segments whose numbers are not in `live`, except those being written. Blocks.

        Args:
            live: numbers of the segments that hold a payload which may still be read; also one that was appended, but has no key yet.
            below: segments from this number on are kept.

        Returns:
            the freed bytes.

        Raises:
            StorageError: a file could not be deleted.
            InvariantBroken: the store is closed.
        """
        kept, freed = set(live), 0
        # Deleting a large file takes milliseconds, for which `append` shall not wait.
        with self._deleting:
            with self._lock:
                self._check_open()
                end = self._writer.segment if below is None else min(below, self._writer.segment)
                dead = [segment for segment in self._sizes if segment not in kept and segment < end]
            for segment in dead:
                with writing(self._folder.path_of(self._number, segment)):
                    self._folder.delete(self._number, segment)
                with self._lock:
                    nbytes = self._sizes.pop(segment)
                    self._size -= nbytes
                freed += nbytes
            if dead:
                with writing(self._folder.path):
                    self._folder.sync()
        return freed

    def retain_left(self, live: Mapping[int, Collection[int]], writers: int) -> int:
        """See `PayloadStore`."""
        freed = 0
        for (writer, segment), nbytes in self._folder.sizes().items():
            if writer > writers and writer != self._number and segment not in live.get(writer, ()):
                with writing(self._folder.path_of(writer, segment)):
                    self._folder.delete(writer, segment)
                freed += nbytes
        return freed

    @property
    def size(self) -> int:
        """Bytes of this writer's segments, including payloads that are not yet written."""
        with self._lock:
            return self._size

    @property
    def newest(self) -> int:
        """Number of the segment that the last payload was appended to; before the first, of the one that it will be."""
        with self._lock:
            return self._newest

    @property
    def torn(self) -> int:
        """Bytes that `open` cut off the newest segment."""
        return self._torn

    def close(self) -> None:
        """Write what was appended, wake all waiters and let go of the folder. Blocks; a second call does nothing.

        Raises:
            StorageError: the disk failed, and no waiter or `append` has said so.
            WaitTimeout: the disk did not answer.
        """
        with self._deleting, self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._writer.close(_CLOSE_S)
        except StorageError:
            self._held.close()
            raise
        self._held.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvariantBroken(f"the journal of {self._folder.path} was used after it was closed")


def check_bound(size: int, nbytes: int, most: int) -> None:
    """Refuse a payload of `nbytes` bytes that would make a store of `size` bytes exceed `most`. Raises StorageError."""
    if size + nbytes > most:
        got = f"{gibibytes(size)} on disk and a payload of {gibibytes(nbytes)}"
        hint = "raise it, or lower trainer.checkpoint_every: what a checkpoint covers is deleted"
        raise StorageError(f"journal.max_bytes: got {got}, expected at most {gibibytes(most)}; {hint}")


def _cut_tail(folder: SegmentFolder, writer: int, sizes: dict[int, int]) -> int:
    """Cut what is torn off the newest segment, and return how many bytes that is. Updates `sizes`."""
    newest = max(sizes, default=None)
    if newest is None:
        return 0
    with writing(folder.path_of(writer, newest)):
        fd = folder.open_segment(writer, newest, os.O_RDWR)
        try:
            end = whole_end(fd, seed_of(folder.identity, writer, newest))
            torn = max(sizes[newest] - end, 0)
            if torn:
                log.info("%s: %d bytes after the last whole payload were cut off", folder.path_of(writer, newest), torn)
                os.ftruncate(fd, end)
                os.fsync(fd)
        finally:
            os.close(fd)
    sizes[newest] -= torn
    return torn
