"""Logs in files. A segment begins with a header and is named after the position of its first record; the record at position p of a segment
that begins at b lies at byte `HEADER_BYTES + p - b`. Only the newest segment can be torn: each is durable before the next one begins.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import pairwise
from pathlib import Path

from asyncmoe import storage
from asyncmoe.errors import DataError, StorageError, UserError, gibibytes
from asyncmoe.log.log import HEAD_BYTES, LOST, Found, Log, Record, checksum
from asyncmoe.log.room import Room
from asyncmoe.trajectory import Buffer

log = logging.getLogger(__name__)

FORMAT = 1
SEGMENT_BYTES = 64 << 20
"""Size at which a new segment begins; a larger record gets its own."""
_LEAST_SEGMENTS = 8
"""Least number of segments that fit into the size bound: only whole segments are deleted, and never the newest."""
_MAGIC, _RECORD_MAGIC = b"AMOElog\0", b"AMrc"
_HEADER, _CRC, _HEAD, _PLACE = struct.Struct("<8sI4xQ32s"), struct.Struct("<I"), struct.Struct("<4sIQ"), struct.Struct("<QQ")
HEADER_BYTES = _HEADER.size + _CRC.size


def header(identity: bytes, first: int) -> bytes:
    """Return the header of a segment. `identity`: SHA-256 of the run's random name."""
    said = _HEADER.pack(_MAGIC, FORMAT, first, identity)
    return said + _CRC.pack(checksum([said]))


def head(identity: bytes, position: int, parts: Sequence[Buffer]) -> bytes:
    """Return the header of a record. Its checksum covers identity, position, length and bytes, so no record passes for another."""
    length = sum(map(len, parts))
    return _HEAD.pack(_RECORD_MAGIC, checksum([identity, _PLACE.pack(position, length), *parts]), length)


def records_in(data: bytes, first: int, identity: bytes) -> Iterator[Found]:
    """Yield records and damaged ranges of a segment, in order. Pure.

    Args:
        data: the segment without its header.
        first: position of the segment's first record.
    """
    view, at, end = memoryview(data), 0, 0
    while 0 <= at <= len(data) - HEAD_BYTES:
        magic, _, length = _HEAD.unpack_from(view, at)
        payload = view[at + HEAD_BYTES : at + HEAD_BYTES + length]
        if magic == _RECORD_MAGIC and len(payload) == length and head(identity, first + at, [payload]) == view[at : at + HEAD_BYTES]:
            if at > end:
                yield first + end, first + at, None
            end = at + HEAD_BYTES + length
            yield first + at, first + end, payload
            at = end
        else:
            at = data.find(_RECORD_MAGIC, at + 1)
    if end < len(data):
        yield first + end, first + len(data), None


def segments_in(folder: Path) -> list[int]:
    """Return the first positions of a folder's segments, ascending."""
    return sorted(int(path.stem) for path in folder.glob("*.segment") if path.stem.isdecimal())


def path_of(folder: Path, first: int) -> Path:
    """Return the path of a segment."""
    return folder / f"{first:020d}.segment"


def scan(folder: Path, identity: bytes | None = None) -> Iterator[Found]:
    """Yield records and damaged ranges of a log, in order. Blocks; changes nothing.

    Args:
        identity: identity of the log; None: the one in each segment's header.

    Raises:
        DataError: a file cannot be read.
    """
    for first, after in pairwise([*segments_in(folder), None]):
        assert first is not None
        said, data = _read(path_of(folder, first), None if after is None else after - first)
        yield from records_in(data, first, identity or said[-_CRC.size - 32 : -_CRC.size])
        if after is not None and first + len(data) < after:
            yield first + len(data), after, None


def _read(path: Path, most: int | None) -> tuple[bytes, bytes]:
    """Return a segment's header, and `most` bytes of its records at most; nothing if its writer has just deleted it. Raises DataError: it
    cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(HEADER_BYTES), file.read(most)
    except FileNotFoundError:
        return b"", b""
    except OSError as error:
        raise DataError(f"log {path}", got=error.strerror, expected="a readable file") from error


def room(folder: Path, writers: Sequence[str]) -> Room:
    """Return the room of the logs in a folder. Blocks. Raises OSError."""
    disk = os.statvfs(folder)
    return Room(max(_size(folder / writer) for writer in writers), disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize)


def _size(folder: Path) -> int:
    """Return the bytes of a log's records: the distance of its positions."""
    firsts = segments_in(folder)
    return firsts[-1] - firsts[0] + path_of(folder, firsts[-1]).stat().st_size if firsts else 0


def examine(folder: Path) -> str:
    """Verify a writer's log and describe it in one line; its end may be in the middle of a write. Blocks. Raises DataError."""
    found = list(scan(folder))
    sizes = [len(data) for _, _, data in found if data is not None]
    gaps = [(begin, end) for begin, end, data in found if data is None]
    end = [gaps.pop()] if found and found[-1][2] is None else []
    paths = [path_of(folder, first) for first in segments_in(folder)]
    damage = [f"the header of {path.name}" for path in paths if not _sound(_read(path, 0)[0])]
    damage += [f"positions {begin} to {after}" for begin, after in gaps]
    torn = "".join(f", {after - begin} bytes at its end are no whole record" for begin, after in end)
    return f"{folder.name}: {len(sizes)} records, {gibibytes(sum(sizes))}, {'damaged: ' + ', '.join(damage) if damage else 'whole'}{torn}"


def _sound(said: bytes) -> bool:
    """Return whether a segment's header has its checksum."""
    return len(said) == HEADER_BYTES and said[-_CRC.size :] == _CRC.pack(checksum([said[: -_CRC.size]]))


class FileReader:
    """A `Reader` of logs in files. Arguments as for `FileLog`."""

    def __init__(self, folder: Path, run: str) -> None:
        self._all, self.identity = folder, hashlib.sha256(run.encode()).digest()

    def found(self, writer: str) -> Iterator[Found]:
        """See `Reader`."""
        return scan(self._all / writer, self.identity)

    def read_at(self, position: int, writer: str) -> Buffer:
        """See `Reader`."""
        folder, got = self._all / writer, "a damaged record"
        first = max((first for first in segments_in(folder) if first <= position), default=position)
        try:
            with path_of(folder, first).open("rb") as file:
                left = os.fstat(file.fileno()).st_size - file.seek(HEADER_BYTES + position - first) - HEAD_BYTES
                if left >= 0:
                    said = file.read(HEAD_BYTES)
                    data = file.read(min(_HEAD.unpack(said)[2], left))
                    if head(self.identity, position, [data]) == said:
                        return data
        except OSError as error:
            got = str(error.strerror)
        raise DataError(f"log {folder} position {position}", got=got, expected="a record", hint=LOST)

    def spans(self, writer: str) -> list[tuple[int, int]]:
        """See `Reader`."""
        found = []
        for first in segments_in(self._all / writer):
            with suppress(FileNotFoundError):  # its writer has just deleted it
                found.append((first, first + path_of(self._all / writer, first).stat().st_size - HEADER_BYTES))
        return found


class FileLog(Log):
    """The log in one folder. Opening it blocks until its newest segment is read.

    Args:
        folder: folder of a run's logs, each in a subfolder named after its writer; made with mode 0700.
        run: the random name of the run.
        segment_bytes: size at which a new segment begins; a larger record gets its own.

    Raises:
        DataError: the log is another run's, or another version wrote it.
        UserError: another process is writing it.
        StorageError: it cannot be written.
    """

    def __init__(self, folder: Path, run: str, writer: str, max_bytes: int | None = None, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder, self._file, reader = folder / writer, -1, FileReader(folder, run)
        self._identity = reader.identity
        self._segment_bytes = min(segment_bytes, max(max_bytes // _LEAST_SEGMENTS, 1)) if max_bytes else segment_bytes
        with self._writing(), ExitStack() as held:
            storage.make_private(folder)
            storage.make_private(self._folder)
            storage.sync_directory(folder)
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            held.callback(os.close, lock)
            _claim(lock, self._folder)
            firsts = segments_in(self._folder)
            end = _end(path_of(self._folder, firsts[-1]), firsts[-1], self._identity) if firsts else 0
            size = sum(path_of(self._folder, first).stat().st_size for first in firsts)
            self._begin(end)
            held.callback(lambda: os.close(self._file))
            self._held = held.pop_all()
        super().__init__(f"log {self._folder}", reader, writer, end, size, max_bytes)

    def _writing(self) -> AbstractContextManager[None]:
        return storage.writing("the log", self._folder, "log.folder names its place; a run that is started again loses nothing")

    def _write(self, batch: Sequence[Record]) -> None:
        with self._writing():
            for position, parts in batch:
                left, offset = memoryview(b"".join([head(self._identity, position, parts), *parts])), position - self._first
                if offset and offset + len(left) > self._segment_bytes:
                    self._sync()
                    self._begin(position)
                    offset = 0
                while left:
                    written = os.pwritev(self._file, [left], HEADER_BYTES + offset)
                    left, offset = left[written:], offset + written

    def _begin(self, first: int) -> None:
        """Begin a segment. An existing file of its name has no whole record, and is overwritten."""
        file = os.open(path_of(self._folder, first), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._first = file, first
        os.pwrite(file, header(self._identity, first), 0)
        os.fsync(file)
        storage.sync_directory(self._folder)

    def _sync(self) -> None:
        with self._writing():
            os.fdatasync(self._file)
        if not os.fstat(self._file).st_nlink:
            raise StorageError(f"{self.name}: {path_of(self._folder, self._first)} was deleted while it was written")

    def _forget(self, below: int) -> int:
        freed = 0
        with self._writing():
            for first, end in pairwise(segments_in(self._folder)):
                if end <= below:
                    freed += path_of(self._folder, first).stat().st_size
                    path_of(self._folder, first).unlink()
            if freed:
                storage.sync_directory(self._folder)
        with self._changing:
            self.size -= freed
        return freed

    def _beat(self) -> None:
        """Do nothing: a file lock lasts as long as its process."""

    def _let_go(self) -> None:
        self._held.close()


def _claim(lock: int, folder: Path) -> None:
    """Lock an open file and write this process's name into it. Raises UserError if another process has the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        got = f"{folder}, in use by another process ({os.pread(lock, 256, 0).decode() or 'unknown'})"
        raise UserError("log", got=got, expected="one controller per run, one process per worker", hint="end that process") from None
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())


def _end(path: Path, first: int, identity: bytes) -> int:
    """Return the position after the last whole record of the newest segment, where the next one begins; anything after it is torn.

    If neither the header nor a record is this log's, the owner of the bytes is unknown, so they stay.

    Raises:
        DataError: another run or version wrote it.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what a killed process wrote and never synced
        said, data = file.read(HEADER_BYTES), file.read()
    ours = said == header(identity, first)
    if not ours and _sound(said):
        hint = f"use the version that wrote it, name another log.folder, or delete {path.parent.parent}; then groups are sampled again"
        raise DataError(f"log {path.parent.parent}", got="the log of another run or version", expected="this run's", hint=hint)
    whole = [end for _, end, payload in records_in(data, first, identity) if payload is not None]
    return max(whole, default=first) if whole or ours else first + len(data)
