"""The Unix socket for clients on the controller's own host: a private directory, and nothing encrypted that never leaves the kernel.

The directory (0700, a random name) is the server's proof to the client; the run's local secret is the client's to the server. So neither
side takes anything from another user of the machine, and the bytes are not encrypted twice a copy.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from asyncmoe.errors import UserError
from asyncmoe.storage import writing

PREFIX, SOCKET = "asyncmoe-wire-", "socket"
USER = "asyncmoe"
"""ZeroMQ's PLAIN mechanism wants a name with the password."""
_PROBE_S = 1.0
_MAX_FOLDER = 107 - len(f"/{PREFIX}xxxxxxxx/{SOCKET}")
"""A Unix socket's path has at most 107 bytes (unix(7)); `mkdtemp` adds 8 to the prefix."""


def make() -> Path:
    """A new directory for a socket, after those of this user's controllers that were killed have been removed.

    Raises:
        UserError: the path of the directory for temporary files is too long for a socket's.
        StorageError: nothing can be made there.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _MAX_FOLDER:
        raise UserError(
            "directory for temporary files", got=folder, expected=f"at most {_MAX_FOLDER} bytes", cure="set TMPDIR to a shorter one"
        )
    for old in Path(folder).glob(f"{PREFIX}*"):
        if is_private(old) and _is_left_behind(old / SOCKET):
            remove(old)
    with writing("the controller's socket", Path(folder)):
        return Path(tempfile.mkdtemp(prefix=PREFIX))


def remove(directory: Path) -> None:
    """Take the directory away; fine if somebody has already."""
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)


def address(directory: Path) -> str:
    """As ZeroMQ writes it."""
    return f"ipc://{directory / SOCKET}"


def reachable(directory: str) -> bool:
    """Whether the server behind `directory` runs on this host, as this user: then its socket is here, and nobody else can have put it."""
    return bool(directory) and is_private(Path(directory)) and (Path(directory) / SOCKET).exists()


def is_private(directory: Path) -> bool:
    """A directory, no link, of this user's, that nobody else may enter."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def _is_left_behind(path: Path) -> bool:
    """A socket that nobody listens on; one that is not bound yet is left alone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
