"""Where ranks meet: in a file if all are on one machine, otherwise at an address.

The file is for torch's `FileStore`, in a folder that only this user may enter. The address is for torch's `TCPStore`, which has no
authentication. Unlike an address, a file does not show when its host ends. So the host locks a file beside it, and the kernel releases the
lock when the process ends for any reason.
"""

from __future__ import annotations

import fcntl
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

from asyncmoe.rpc.address import reachable, several
from asyncmoe.storage import writing

_STORE, _LOCK = "store", "lock"


class MeetingFile:
    """A new file, deleted with this object.

    Attributes:
        path: path of the store.

    Raises:
        StorageError: the file cannot be made.
    """

    def __init__(self) -> None:
        temporary = Path(tempfile.gettempdir())
        with writing("the store in which ranks meet", temporary):
            folder = Path(tempfile.mkdtemp(prefix="asyncmoe-meeting-"))
            self._lock = (folder / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = folder / _STORE
        # Keep the file at interpreter exit: threads that then noticed its deletion could no longer end in order.
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True).atexit = False


Hosted = socket.socket | MeetingFile
"""How rank 0 hosts a store: with a listening socket, or a file."""


def host(network: str) -> Hosted:
    """Return the host's end of rank 0's store: a file, or, with several machines, a listening socket on a free port of this machine.

    Args:
        network: as `cluster.network`.

    Raises:
        UserError: see `asyncmoe.rpc.address.reachable`.
        StorageError: the file cannot be made.
    """
    return socket.create_server((reachable(network), 0)) if several(network) else MeetingFile()


def place(hosted: Hosted) -> tuple[str, int]:
    """Return a store's place for other ranks: address and port; or path and 0."""
    if isinstance(hosted, MeetingFile):
        return str(hosted.path), 0
    address, port = hosted.getsockname()[:2]
    return str(address), int(port)


def is_held(path: Path) -> bool:
    """Return whether the host of a store is still running."""
    try:
        with path.with_name(_LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
