"""An engine over several nodes: the place of each node, and where all ranks meet.

The server of node 0 answers HTTP; the servers of the other nodes only hold ranks. If a node is lost, so is the engine, because all ranks
wait for each other in every forward pass.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass

from asyncmoe.errors import UserError
from asyncmoe.scratch import Scratch


@dataclass(frozen=True)
class NodePlace:
    """One node of an engine.

    Attributes:
        node: its number, from 0.
        meeting: where all ranks meet, as torch writes it: "tcp://10.1.0.3:29500", or "file:///..." for nodes on one machine. Empty: the
            engine has no other node.
        key: secret key, as Z85 text, of the sockets between the servers of several machines.
    """

    node: int = 0
    meeting: str = ""
    key: str = ""


ALONE = NodePlace()


class MeetingPlace:
    """Where the ranks of an engine meet: a file that only this user can reach if all are on one machine, else a port of this machine.

    Attributes:
        url: as `NodePlace.meeting`.
        close: releases it, after the ranks have ended. Idempotent.

    Args:
        host: address at which other machines reach this one; None: all ranks are on this machine.

    Raises:
        StorageError: the file's folder cannot be made.
        UserError: the address is not this machine's.
    """

    def __init__(self, host: str | None) -> None:
        self.close: Callable[[], None]
        if host is None:
            scratch = Scratch()
            self.url, self.close = f"file://{scratch.path}/ranks", scratch.remove
        else:
            reserved = reserve(host, 0)
            self.url, self.close = f"tcp://{host}:{reserved.getsockname()[1]}", reserved.close


def process_name(name: str, node: int) -> str:
    """Return the name of a node's process in records and messages."""
    return f"{name}.node{node}" if node else name


def reserve(host: str, wanted: int) -> socket.socket:
    """Return a bound socket that reserves the port for the many seconds until a server listens on it.

    The socket never listens, and both it and the server set SO_REUSEADDR (servers through asyncio, stores through libuv), so Linux lets the
    server bind the port too.

    Args:
        wanted: the port; 0: any free one.

    Raises:
        UserError: the port is taken, or the address is not of this machine.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, wanted))
    except OSError as error:
        reserved.close()
        if error.errno == errno.EADDRNOTAVAIL:
            hint = "see cluster.network and ASYNCMOE_HOST"
            raise UserError(f"address {host}", got=error.strerror, expected="an address of this machine", hint=hint) from error
        hint = "choose another engines.port, or 0 for any"
        raise UserError(f"port {wanted} on {host}", got=error.strerror, expected="a free port", hint=hint) from error
    return reserved
