"""Shuts the ports of gloo's process groups as soon as their ranks have met.

Every group listens on TCP, asks for no key, and goes on listening to its end: it reads eight bytes from whoever connects and keeps the
connection, for whose number a rank may still wait (gloo/transport/tcp/listener.cc). While ranks meet, another user of the machine may get
in between, and afterwards take all descriptors of a rank. So as soon as a group has met, the kernel drops whatever arrives at its ports
(SO_ATTACH_FILTER, socket(7)), and connections of other users are cut before anything was sent over them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

log = logging.getLogger(__name__)
_SO_ATTACH_FILTER, _SO_LOCK_FILTER = 26, 44
_RETURN_0 = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A classic BPF program that keeps 0 bytes of any packet: BPF_RET | BPF_K (linux/filter.h)."""
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_LAZY = "TORCH_GLOO_LAZY_INIT"
"""With it, ranks connect when they first talk to each other, so ports have to stay open."""
_installed = False


def install() -> None:
    """Have every gloo process group that this process makes from now on shut its ports. Later calls do nothing."""
    global _installed
    if _installed or os.environ.get(_LAZY, "0") not in ("", "0"):
        return
    _installed = True
    gloo: Any = distributed_c10d.ProcessGroupGloo
    connect = gloo.__init__

    def connect_and_shut(self: Any, *arguments: Any, **named: Any) -> None:
        before = _listeners()
        connect(self, *arguments, **named)
        shut({fd: inode for fd, inode in _listeners().items() if before.get(fd) != inode})

    gloo.__init__ = connect_and_shut


def shut(listeners: dict[int, int]) -> None:
    """Let nobody connect any more, and cut connections of other users.

    Args:
        listeners: descriptor -> inode of this process's listening sockets. All connections to them that are wanted exist.
    """
    for fd in listeners:
        with socket.socket(fileno=os.dup(fd)) as listener:
            _drop_all(listener)
    strangers = _strangers(set(listeners.values()))
    for fd, inode in _sockets().items():
        if inode in strangers:
            log.warning("a process of user %d had connected to a port of gloo; it is cut off", strangers[inode])
            with socket.socket(fileno=os.dup(fd)) as connection, suppress(OSError):  # the stranger may have left
                connection.shutdown(socket.SHUT_RDWR)


def _drop_all(listener: socket.socket) -> None:
    program = ctypes.create_string_buffer(_RETURN_0)
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    listener.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)


def _listeners() -> dict[int, int]:
    """Return descriptor -> inode of this process's listening TCP sockets."""
    return {fd: inode for fd, inode in _sockets().items() if _listens(fd)}


def _listens(fd: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as one:
            return one.family in (socket.AF_INET, socket.AF_INET6) and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # another thread has closed it
        return False


def _sockets() -> dict[int, int]:
    """Return descriptor -> inode of this process's sockets."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            kind, _, inode = os.readlink(f"/proc/self/fd/{entry}").partition(":")
            if kind == "socket":
                found[int(entry)] = int(inode.strip("[]"))
    return found


def _strangers(listeners: set[int]) -> dict[int, int]:
    """Return inode -> user of the connections to listening sockets whose other end, on this machine, belongs to another user.

    The rows of the table are proc(5)'s: number, own address, address of the peer, state, ..., user (8th word), ..., inode (10th word).
    """
    rows = [line.split() for table in _TABLES if table.exists() for line in table.read_text().splitlines()[1:]]
    ports = {row[1] for row in rows if int(row[9]) in listeners}
    owners = {(row[1], row[2]): int(row[7]) for row in rows}
    accepted = [row for row in rows if row[1] in ports and int(row[9]) not in listeners]
    found = {int(row[9]): owners.get((row[2], row[1]), os.geteuid()) for row in accepted}
    return {inode: user for inode, user in found.items() if user != os.geteuid()}
