"""The records of a segment as they lie in its file, whole, damaged or torn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from asyncmoe.journal.segment_format import ALIGNMENT, HEAD_BYTES, HEADER_BYTES, RECORD_MAGIC, RecordHead, footprint, padded, unpack_head
from asyncmoe.trajectory.native import crc32c

_WINDOW = 4 << 20


@dataclass(frozen=True)
class ScannedRecord:
    """Consecutive bytes of a segment: a record, or what lies between two of them.

    Args:
        offset, end: first byte, and the one after the last.
        length: bytes of the payload; None: no head of a record was found, or one of a record that does not end in the file.
        whole: the payload has its checksum.
    """

    offset: int
    end: int
    length: int | None
    whole: bool


def scan(descriptor: int, seed: int) -> Iterator[ScannedRecord]:
    """Read all bytes after a segment's header, in order, in windows of 4 MiB.

    Args:
        seed: `segment_format.seed_of` the segment.

    Raises:
        OSError: the disk failed.
    """
    file = _Windows(descriptor)
    offset = HEADER_BYTES
    while offset < file.size:
        head = unpack_head(file.at(offset, HEAD_BYTES), seed, offset)
        if head is not None and offset + footprint(head.length) <= file.size:
            end = offset + footprint(head.length)
            yield ScannedRecord(offset, end, head.length, file.digest(offset + HEAD_BYTES, padded(head.length)) == head.digest)
        else:
            end = _next_record(file, seed, offset + ALIGNMENT)
            yield ScannedRecord(offset, end, None, whole=False)
        offset = end


def whole_end(descriptor: int, seed: int) -> int:
    """Return the offset after the last whole record of a segment. Arguments and errors as for `scan`."""
    return max((found.end for found in scan(descriptor, seed) if found.whole), default=HEADER_BYTES)


def _next_record(file: _Windows, seed: int, offset: int) -> int:
    """Return the offset of the first head of a record from `offset` on, or the size of the file."""
    magic = np.frombuffer(RECORD_MAGIC, "<u4")[0]
    while offset < file.size:
        window = file.at(offset, min(_WINDOW, file.size - offset))
        words = np.frombuffer(window[: len(window) // ALIGNMENT * ALIGNMENT], "<u4")[:: ALIGNMENT // 4]
        for place in (np.flatnonzero(words == magic) * ALIGNMENT + offset).tolist():
            head: RecordHead | None = unpack_head(file.at(place, HEAD_BYTES), seed, place)
            if head is not None and place + footprint(head.length) <= file.size:
                return int(place)
        offset += _WINDOW
    return file.size


class _Windows:
    """A file of which a window is in memory."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor
        self.size = os.fstat(descriptor).st_size
        self._begin, self._bytes = 0, b""

    def at(self, offset: int, count: int) -> memoryview:
        """Return `count` <= 4 MiB bytes, fewer at the end of the file."""
        if not self._begin <= offset <= offset + count <= self._begin + len(self._bytes):
            self._begin, self._bytes = offset, os.pread(self._fd, _WINDOW, offset)
        return memoryview(self._bytes)[offset - self._begin : offset - self._begin + count]

    def digest(self, offset: int, count: int) -> int:
        """CRC-32C of `count` bytes."""
        crc, end = 0, offset + count
        while offset < end:
            part = self.at(offset, min(_WINDOW, end - offset))
            if not part:
                raise OSError("the file became shorter while it was read")
            crc, offset = crc32c(part, crc), offset + len(part)
        return crc
