"""The folder of segment files: who may write to it, and its files as they are made, listed, read and deleted."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncmoe import storage
from asyncmoe.errors import DataError, StorageError, UserError
from asyncmoe.journal.segment_format import (
    HEAD_BYTES,
    HEADER_BYTES,
    VERSION,
    Place,
    file_name,
    numbers_in,
    pack_header,
    padded,
    seed_of,
    unpack_head,
    unpack_header,
)
from asyncmoe.trajectory.native import crc32c

log = logging.getLogger(__name__)

_WRITING = ".writing"
_MOST_LOCK_BYTES = 256


class SegmentFolder:
    """An open folder. Paths within it stay right if it is renamed.

    Args:
        path: for messages.
        descriptor: of the folder; `close` closes it.
        identity: what the store says of itself; the files have its SHA-256.
    """

    def __init__(self, path: Path, descriptor: int, identity: str) -> None:
        self.path, self._fd = path, descriptor
        self.identity = hashlib.sha256(identity.encode()).digest()

    @classmethod
    def open(cls, path: Path, identity: str) -> SegmentFolder:
        """Open a folder that exists.

        Raises:
            DataError: it is no folder, or belongs to or is open to other users.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError("journal", got=f"{path}: {error.strerror}", expected="a folder that can be read") from error
        try:
            check_private(path, os.fstat(fd))
        except DataError:
            os.close(fd)
            raise
        return cls(path, fd, identity)

    def close(self) -> None:
        """Close the folder."""
        os.close(self._fd)

    def path_of(self, writer: int, segment: int) -> Path:
        """Path of a segment, for messages."""
        return self.path / file_name(writer, segment)

    def lock(self, writer: int) -> int:
        """Become the only one who writes as `writer`, until the returned descriptor is closed or the process ends.

        Raises:
            UserError: another process holds the lock; the error has its number.
            StorageError: the lock cannot be written, or the file system has no locks.
        """
        name = f"{writer:04d}.lock"
        with writing(self.path / name):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with writing(self.path / name):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BlockingIOError:
            holder = os.pread(fd, _MOST_LOCK_BYTES, 0).decode(errors="replace") or "another process"
            os.close(fd)
            got = f"{self.path}, which {holder} writes"
            raise UserError("journal", got=got, expected="one writer", hint="wait until that process has ended") from None
        except OSError as error:
            os.close(fd)
            without_locks = error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
            why = "its file system has no locks" if without_locks else f"it cannot be locked: {error.strerror}"
            raise StorageError(f"journal: {self.path}: {why}; choose a folder on a disk of this node") from error
        except StorageError:
            os.close(fd)
            raise
        return fd

    def sizes(self) -> dict[tuple[int, int], int]:
        """(writer, segment) -> bytes of every segment, ascending."""
        found = {}
        with os.scandir(self._fd) as entries:
            for entry in entries:
                numbers = numbers_in(entry.name)
                if numbers is not None:
                    with suppress(FileNotFoundError):  # another writer has deleted it meanwhile
                        found[numbers] = entry.stat(follow_symlinks=False).st_size
        return dict(sorted(found.items()))

    def check(self, writer: int, segment: int) -> bool:
        """Compare a segment's header with this store.

        Returns:
            whether the header is undamaged.

        Raises:
            DataError: it is another store's, another format's or cannot be read.
        """
        path = self.path_of(writer, segment)
        try:
            fd = self.open_segment(writer, segment)
            try:
                header = unpack_header(os.pread(fd, HEADER_BYTES, 0))
            finally:
                os.close(fd)
        except FileNotFoundError:
            return True  # another writer has deleted it meanwhile
        except OSError as error:
            raise DataError(f"journal segment {path}", got=error.strerror, expected="a file that can be read") from error
        if header is None:
            log.warning("%s: the header is damaged; whether its payloads are whole is found when they are read", path)
            return False
        if header.version != VERSION:
            hint = "use the version of asyncmoe that wrote it, or another folder"
            raise DataError(f"journal segment {path}: format", got=header.version, expected=VERSION, hint=hint)
        if header.identity != self.identity:
            got, expected = header.identity.hex()[:16], f"{self.identity.hex()[:16]} as this run has"
            hint = "the segments are of another run, model or seed: use their configuration, or another folder"
            raise DataError(f"journal segment {path}: identity", got=got, expected=expected, hint=hint)
        if (header.writer, header.segment) != (writer, segment):
            got = f"the segment {header.segment} of writer {header.writer}"
            raise DataError(f"journal segment {path}", got=got, expected="the segment of its name", hint="give the file its name back")
        return True

    def open_segment(self, writer: int, segment: int, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of a segment."""
        return os.open(file_name(writer, segment), flags | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)

    def create(self, writer: int, segment: int) -> int:
        """Make an empty segment, whole under its name after any kill, and return its descriptor.

        Raises:
            StorageError: the disk refused it.
        """
        name = file_name(writer, segment)
        with writing(self.path / name):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(name + _WRITING, flags, 0o600, dir_fd=self._fd)
            try:
                write_all(fd, [memoryview(pack_header(self.identity, writer, segment))], 0)
                os.fsync(fd)
                os.rename(name + _WRITING, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                os.fsync(self._fd)
            except OSError:
                os.close(fd)
                raise
        return fd

    def clear(self, writer: int) -> None:
        """Delete the remains of segments whose making was killed."""
        with writing(self.path), os.scandir(self._fd) as entries:
            for entry in entries:
                numbers = numbers_in(entry.name.removesuffix(_WRITING)) if entry.name.endswith(_WRITING) else None
                if numbers is not None and numbers[0] == writer:
                    os.unlink(entry.name, dir_fd=self._fd)

    def delete(self, writer: int, segment: int) -> None:
        """Delete a segment; `sync` makes it last."""
        os.unlink(file_name(writer, segment), dir_fd=self._fd)

    def sync(self) -> None:
        """Write the folder's names to the disk."""
        os.fsync(self._fd)

    def read(self, place: Place) -> bytearray:
        """Read and verify a payload.

        Raises:
            DataError: damaged or absent; names file and offset.
        """
        try:
            fd = self.open_segment(place.writer, place.segment)
            try:
                return self._read(fd, place)
            finally:
                os.close(fd)
        except (OSError, OverflowError) as error:
            raise self._unusable(place, f"{error.strerror if isinstance(error, OSError) else error}") from error

    def _read(self, fd: int, place: Place) -> bytearray:
        if place.length < 0 or place.offset < HEADER_BYTES or place.end > os.fstat(fd).st_size:
            raise self._unusable(place, f"a file of {os.fstat(fd).st_size} bytes")
        seed = seed_of(self.identity, place.writer, place.segment)
        head = unpack_head(os.pread(fd, HEAD_BYTES, place.offset), seed, place.offset)
        if head is None:
            raise self._unusable(place, "damage before the payload, or none there")
        if head.length != place.length:
            raise self._unusable(place, f"a payload of {head.length} bytes")
        data = bytearray(padded(place.length))
        read_into(fd, memoryview(data), place.offset + HEAD_BYTES)
        if crc32c(data) != head.digest:
            raise self._unusable(place, "a damaged payload: its checksum is wrong")
        del data[place.length :]
        return data

    def _unusable(self, place: Place, got: str) -> DataError:
        what = f"journal segment {self.path_of(place.writer, place.segment)} offset {place.offset}"
        hint = "bring back a copy of the whole journal from after the run's stop, or delete it: what was queued is then sampled again"
        return DataError(what, got=got, expected=f"a payload of {place.length} bytes", hint=hint)


def make_folder(path: Path) -> None:
    """Make a folder of mode 0700, and the folders above it, so that they last.

    Raises:
        StorageError: the disk refused it.
    """
    missing = [place for place in (path, *path.parents) if not place.is_dir()]
    for place in reversed(missing):
        with writing(place):
            place.mkdir(mode=0o700 if place == path else 0o777, exist_ok=True)
            above = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(above)
            finally:
                os.close(above)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert every OSError of the block to a `StorageError` that names `path`: of a journal none is harmless."""
    try:
        yield
    except OSError as error:
        raise failure(error, path) from error


def failure(error: OSError, path: Path) -> StorageError:
    """Return the `StorageError` for an error of the disk."""
    known = storage.explain(error, "journal", path)
    return known or StorageError(f"journal: cannot write {path} on {socket.gethostname()}: {error.strerror or error}")


def write_all(fd: int, buffers: list[memoryview], offset: int) -> int:
    """Write buffers one behind the other, and return the offset after them. None may be empty."""
    first, most = 0, os.sysconf("SC_IOV_MAX")
    while first < len(buffers):
        written = os.pwritev(fd, buffers[first : first + most], offset)
        if not written:
            raise OSError(errno.EIO, "the disk takes no bytes")
        offset += written
        while first < len(buffers) and written >= buffers[first].nbytes:
            written -= buffers[first].nbytes
            first += 1
        if written:
            buffers[first] = buffers[first][written:]
    return offset


def read_into(fd: int, view: memoryview, offset: int) -> None:
    """Fill a view from a file.

    Raises:
        OSError: the disk failed, or the file ends before.
    """
    while view.nbytes:
        got = os.preadv(fd, [view], offset)
        if not got:
            raise OSError(errno.EIO, "the file ends in the payload")
        view, offset = view[got:], offset + got


def check_private(path: Path, found: os.stat_result) -> None:
    """Refuse a folder that belongs to or is open to other users. Raises DataError."""
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid() or mode & 0o077:
        got, hint = f"{path} of user {found.st_uid} with mode {mode:04o}", f"chmod 700 {path}, or name another folder"
        raise DataError("journal", got=got, expected=f"a folder of user {os.geteuid()} with mode 0700", hint=hint)
