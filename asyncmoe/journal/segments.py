"""Append-only, checksummed payload files with one writer, group commit and a bound on bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from asyncmoe.journal.segment_format import Place
from asyncmoe.trajectory import Buffer

__all__ = ["Place", "Segments"]


class Segments:
    """Payloads in the segment files of one folder.

    `append`, `read`, `retain` and `size` may be called from any thread, `room` and `durable` from any event loop.
    """

    @classmethod
    def open(cls, folder: Path, identity: str, *, writer: int = 0, segment_bytes: int = 256 << 20, max_bytes: int) -> Segments:
        """Open the store of a folder for writing; make the folder (mode 0700) if it is absent.

        The bytes after the last whole record of the newest segment are cut off. A new segment is begun, so that a place never means two
        payloads.

        Args:
            identity: of run, model and seed; its SHA-256 is in every segment's header.
            segment_bytes: size from which a new segment is begun; a larger payload has a segment of its own.
            max_bytes: bound on all segments of this writer together.

        Raises:
            DataError: the segments have another identity or format, or the folder belongs to or is open to other users.
            UserError: another process writes to the folder; the error has its pid.
            StorageError: the folder cannot be written, or its file system has no locks.
        """
        raise NotImplementedError

    async def room(self, nbytes: int) -> None:
        """Wait until `append` takes a payload of so many bytes; true until the caller's next `await`.

        Raises:
            StorageError: as `append`, except that it waits for bytes that are not yet written.
        """
        raise NotImplementedError

    def append(self, parts: Sequence[Buffer]) -> Place:
        """Hand a payload to the writer thread and return where it will lie. Never waits.

        Args:
            parts: joined, the payload. They are written as they are, so nobody may change them before `durable` has returned.

        Raises:
            StorageError: the disk failed before, the store would exceed `max_bytes` (journal.max_bytes; possible again after `retain`), or
                too many bytes are not yet written (`room` waits for that).
            InvariantBroken: the store is closed.
        """
        raise NotImplementedError

    async def durable(self, place: Place) -> None:
        """Wait until the payload is on disk; one fsync serves all that wait.

        Raises:
            StorageError: the disk failed. Every waiter gets it, and the store takes no more payloads.
            DataError: nothing was appended there.
        """
        raise NotImplementedError

    def read(self, place: Place) -> bytearray:
        """Read a payload and verify its checksum. Blocks. A payload can be read once it is durable.

        Raises:
            DataError: damaged or absent; names file and offset.
        """
        raise NotImplementedError

    def retain(self, live: Iterable[int]) -> int:
        """Delete the segments whose numbers are not in `live`, except the newest, which is being written. Blocks.

        Returns:
            the freed bytes.

        Raises:
            StorageError: a file could not be deleted.
        """
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Bytes of this writer's segments, including payloads that are not yet written."""
        raise NotImplementedError

    @property
    def torn(self) -> int:
        """Bytes that `open` cut off the newest segment."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what was appended, wake all waiters and let go of the folder. Blocks; a second call does nothing.

        Raises:
            StorageError: the disk failed, and no waiter or `append` has said so.
            WaitTimeout: the disk did not answer.
        """
        raise NotImplementedError
