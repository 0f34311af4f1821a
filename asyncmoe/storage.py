"""Converts write errors to one line that names the file's purpose, path and node, the reason, the free space and a fix."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from asyncmoe.errors import AsyncmoeError, DataError, StorageError, WaitTimeout

T = TypeVar("T")
_ROOM = "make room there, or write to another file system"
_LOCKLESS = "write to a local disk: this file system lacks locks, or another call that is needed"
_CURES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: "make room there, ask for a larger quota, or write to another file system",
    errno.EFBIG: "raise the file size limit (ulimit -f), or write to another file system",
    errno.EROFS: "mount it for writing, or write to another file system",
    errno.EIO: "the device or its server fails: see the node's kernel log, or write to another file system",
    errno.ESTALE: "mount the file system again on this node: its server has forgotten this mount",
    errno.EACCES: "write to a directory this user may write to, or change the permissions",
    errno.EPERM: "write to a directory this user may write to, or change the permissions",
    errno.ENOTDIR: "choose a path with no file among its parts",
    errno.EEXIST: "choose a path with no file among its parts",
    errno.ELOOP: "choose a path without a link that leads to itself",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOLCK: _LOCKLESS,
    errno.ENOSYS: _LOCKLESS,
    errno.EOPNOTSUPP: _LOCKLESS,
}
"""Fixes by errno, for all storage errors; any other errno is a bug in asyncmoe."""
_RUST = re.compile(r"\(os error (\d+)\)")
"""Ending of I/O error messages of safetensors and tokenizers, which are written in Rust."""
_TORCH = ("inline_container", "iostream error", "PytorchStreamWriter")
"""Parts of torch.save's error messages for failed writes; they do not contain the reason."""
_PROBE_BYTES = 64 << 10
_GIB = 1 << 30


@contextmanager
def writing(what: str, path: Path, then: str = "") -> Iterator[None]:
    """Convert storage errors within the block to `StorageError`; other errors pass unchanged.

    Args:
        what: the written object, in the user's terms ("the checkpoint of step 8").
        path: the file or directory.
        then: what to do after the fix, if more than a restart.

    Raises:
        StorageError: the write failed.
    """
    try:
        yield
    except Exception as error:
        failure = explain(error, what, path, then)
        if failure is None:
            raise
        raise failure from error


def within(seconds: float, whom: str, what: str, act: Callable[[], T]) -> T:
    """Call `act` in a thread of its own and wait at most `seconds`: a file system may not respond.

    Raises:
        WaitTimeout: it did not return in time; the thread is abandoned.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:  # noqa: BLE001  passed to the caller
            answer.set_exception(error)

    threading.Thread(target=ask, name="storage", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        if answer.done():
            raise
        raise WaitTimeout(whom, what, seconds) from error


def check_new(what: str, out: Path) -> None:
    """Refuse an output path that exists or cannot be created; leave nothing there.

    Args:
        what: as for `writing`.

    Raises:
        DataError: `out` exists, or nothing can be created there.
        StorageError: this user may not write there, or one of its parents is a file.
    """
    if os.path.lexists(out):
        raise DataError(str(out), got="an existing path" if out.exists() else "a symbolic link to nothing", expected="a new path")
    if barren := try_place(what, out):
        raise DataError(str(out), got=f"a path where {barren}", expected="a path on a disk")


def try_place(what: str, directory: Path) -> str:
    """Create a folder where `directory` is or would be, and remove it without a trace. Return why nothing can be created there, for example
    below /proc or a dangling link, else "".

    Args:
        what: as for `writing`.

    Raises:
        StorageError: one of its parents is a file, or this user may not write there.
    """
    place = next(one for one in (directory, *directory.absolute().parents) if os.path.lexists(one))
    with writing(what, directory):
        with suppress(FileNotFoundError):
            directory.stat()  # raises if a name is too long
        try:
            before = place.stat()
            Path(tempfile.mkdtemp(prefix=".asyncmoe-", dir=place)).rmdir()
            with suppress(OSError):  # it is another user's, such as /tmp
                os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
        except FileNotFoundError as error:
            return f"nothing can be created in {place} ({error.strerror})"
    return ""


@contextmanager
def new_directory(what: str, out: Path) -> Iterator[Path]:
    """Yield an empty directory beside `out`, which becomes `out` at the end of the block; if the block raises, it is deleted. A process
    that is killed meanwhile leaves it, under a hidden name that begins with that of `out`.

    Missing parents of `out` are created.

    Args:
        what: as for `writing`.

    Raises:
        DataError: see `check_new`.
        StorageError: it cannot be created or renamed. The block wraps its own writes in `writing`.
    """
    check_new(what, out)
    scratch = out.with_name(f".{out.name}-{secrets.token_hex(8)}")
    with writing(what, out):
        scratch.mkdir(parents=True)  # unlike `mkdtemp`, with the mode of the user's umask
    try:
        yield scratch
        with writing(what, out):
            os.rename(scratch, out)  # fails if another process created `out` first
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def lock_alone(lock: IO[str]) -> bool:
    """Lock an open file until it is closed, or close it and return False if another process has the lock. A shared file system may lack
    locks, as Lustre does without -o flock; then nothing is locked.

    Raises:
        OSError: it cannot be locked.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
    return True


def explain(error: BaseException, what: str, path: Path, then: str = "") -> StorageError | None:
    """Return the `StorageError` for the user if `error` comes from storage, else None. Arguments as for `writing`."""
    if isinstance(error, AsyncmoeError):
        return error if isinstance(error, StorageError) else None
    number = _errno(error, path)
    if number is None:
        return None
    name, reason = errno.errorcode.get(number, str(number)), os.strerror(number)
    hint = f"{_CURES[number]}; {then}" if then else _CURES[number]
    return StorageError(f"{what}: cannot write {path} on {socket.gethostname()}: {reason} ({name}), {_free(path)}; {hint}")


def make_private(directory: Path) -> None:
    """Make a directory that only this user may enter. An existing one keeps its mode.

    Raises:
        OSError: it cannot be made.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def replace(path: Path, content: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Replace a file atomically: readers find the whole old or the whole new content; with `durable`, after a power cut, too.

    Args:
        mode: permissions before the user's umask.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)  # so nobody else has it open, or has chosen its permissions
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk, if the file system can. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # raised by file systems in user space that cannot flush it
            raise
    finally:
        os.close(handle)


def share(folder: Path, like: str) -> None:
    """Give safetensors files, which are written for this user alone, the mode of another file in their folder."""
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / like).stat().st_mode)


def size(nbytes: float) -> str:
    """Format bytes in decimal units with three significant digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def probe(directory: Path) -> OSError | None:
    """Test whether a file can be written in `directory` now. Returns the error, or None."""
    path = directory / f".probe-{os.getpid()}"
    try:
        replace(path, bytes(_PROBE_BYTES), durable=True)
    except OSError as error:
        return error
    finally:
        with suppress(OSError):
            path.unlink()
    return None


def _errno(error: BaseException, path: Path) -> int | None:
    """Return the first errno of a storage error in the chain of `error` and its causes, or None."""
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        found = each.errno if isinstance(each, OSError) else _in_text(str(each), path)
        if found in _CURES:
            return found
        each = each.__cause__ or each.__context__
    return None


def _in_text(text: str, path: Path) -> int | None:
    written = _RUST.search(text)
    if written is not None:
        return int(written[1])
    if any(part in text for part in _TORCH):
        refused = probe(_existing(path))
        return None if refused is None else refused.errno
    return None


def _free(path: Path) -> str:
    place = _existing(path)
    try:
        usage, nodes = shutil.disk_usage(place), os.statvfs(place)
    except OSError as error:
        return f"free space unknown ({error.strerror})"
    if nodes.f_files and not nodes.f_favail:
        return f"0 of {nodes.f_files} inodes free"
    return f"{usage.free / _GIB:.3f} of {usage.total / _GIB:.3f} GiB free"


def _existing(path: Path) -> Path:
    """Return `path`, if it is a directory, or its nearest existing parent directory."""
    return next(place for place in (path, *path.absolute().parents) if os.path.isdir(place))
