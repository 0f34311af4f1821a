"""The Unix socket, in a private directory, for clients on the controller's own host.

The directory (0700, a random name) authenticates the server to the client; the run's local secret authenticates the client to the server.
Neither side accepts data from other users of the machine. The data never leaves the kernel, so it need not be encrypted and decrypted.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from asyncmoe.errors import UserError
from asyncmoe.scratch import Scratch, is_private

SOCKET = "socket"
USER = "asyncmoe"
"""ZeroMQ's PLAIN mechanism requires a user name with the password."""
_PROBE_S = 1.0
_MAX_FOLDER = 107 - len(f"/asyncmoe-xxxxxxxx/{SOCKET}")
"""A Unix socket's path has at most 107 bytes (unix(7))."""


def make() -> Scratch:
    """Create a directory for a socket.

    Raises:
        UserError: the path of the directory for temporary files is too long for a socket.
        StorageError: the directory cannot be created.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _MAX_FOLDER:
        raise UserError(
            "directory for temporary files", got=folder, expected=f"a path of at most {_MAX_FOLDER} bytes", hint="set TMPDIR to one"
        )
    return Scratch()


def address(directory: Path) -> str:
    """Return the socket's address in ZeroMQ's notation."""
    return f"ipc://{directory / SOCKET}"


def reachable(directory: str) -> bool:
    """Return whether the server of `directory` runs on this host as this user: its socket exists, and no other user can have created it."""
    return bool(directory) and is_private(Path(directory)) and (Path(directory) / SOCKET).exists()


def is_left_behind(directory: Path) -> bool:
    """Return whether the directory's socket exists but nobody listens on it. False for a socket that is not bound yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(directory / SOCKET))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
