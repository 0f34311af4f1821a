"""The blocking client of the controller and of rollout workers, for trainer ranks."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence

import msgspec
import zmq

from asyncmoe import errors
from asyncmoe.errors import AsyncmoeError, ProtocolError, TrajectoryRejected, UserError, WaitTimeout
from asyncmoe.rpc.codec import decode_reply, encode
from asyncmoe.rpc.connection import Connection
from asyncmoe.rpc.messages import Refused, Reply, Request, TrainerMessage
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.trajectory import Buffer

CONNECT_S = 10.0
"""A controller without a connection for this many seconds counts as dead, whatever the timeout of the reply."""
ANSWER_S = 60.0
"""Timeout, in seconds, of controller replies that require no waiting."""
_BESIDE_S = 2.0
"""CONNECT_S for a rollout worker: shorter, because the controller knows whether the worker is lost."""


class ConnectionGone(WaitTimeout):
    """No reply can come any more: the connection was lost or could not be made, so the peer has probably ended."""


class Client:
    """Sends the controller one request at a time. Not thread-safe.

    Args:
        rendezvous: from `asyncmoe.rpc.keys.read`.
        name: name of this process in errors ("trainer.0").
        epoch: epoch of the trainer that this process belongs to; every request of a trainer carries it.
        peer: name of the server in errors; default: the controller's.
        connect_s: seconds to wait for a connection.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, epoch: int = 0, peer: str = "", connect_s: float = CONNECT_S) -> None:
        self._connect_s = connect_s
        self.name, self._epoch = name, epoch
        self._peer = peer or rendezvous.controller
        self._connection = Connection(rendezvous)
        self._asked = 0
        self._beside: dict[str, tuple[Rendezvous, Client]] = {}

    def beside(self, rendezvous: Rendezvous, peer: str) -> Client:
        """Return a client of another server of the run. It is cached here, and closed once that server has been replaced."""
        known = self._beside.get(peer)
        if known is None or known[0] != rendezvous:
            if known is not None:
                known[1].close()
            known = self._beside[peer] = rendezvous, Client(rendezvous, self.name, self._epoch, peer, _BESIDE_S)
        return known[1]

    def ask(self, request: Request, timeout_s: float) -> tuple[Reply, list[Buffer]]:
        """Send a request and wait for its reply and the frames that follow (read-only views of the received data).

        A reply that arrives after its `ask` timed out is discarded, so the same request may be sent again.

        Raises:
            WaitTimeout: no reply within `timeout_s`. Names the controller.
            ConnectionGone: no connection for 10 s, or it was lost while waiting (the controller died). Names the controller.
            ProtocolError: the reply is malformed, or the request is larger than the controller accepts.
            AsyncmoeError: the controller refused the request; the class is the one that the controller raised.
        """
        name, begin, connection = type(request).__name__, time.monotonic(), self._connection
        if self._epoch and isinstance(request, TrainerMessage):
            request = msgspec.structs.replace(request, epoch=self._epoch)
        self._asked += 1
        asked = struct.pack(">Q", self._asked)
        connection.wait(0)
        losses = connection.losses
        try:
            connection.socket.send_multipart([asked, encode(request)], zmq.NOBLOCK)
        except zmq.Again:
            connection.wait(1.0)  # a refused connection cannot send either, but its event may arrive slightly later
            why = connection.why_lost(losses) or "too many unanswered requests"
            raise ConnectionGone(self._peer, f"{self.name} could not send {name}: {why}", 0.0) from None
        while True:
            lost, limit = connection.why_lost(losses), timeout_s if connection.up else min(timeout_s, self._connect_s)
            left = begin + limit - time.monotonic()
            if (lost or left <= 0) and not connection.wait(0):  # else a reply has already arrived
                why = lost or ("no reply" if connection.up else "no connection; the server is not running, or has other keys")
                kind = ConnectionGone if lost or not connection.up else WaitTimeout
                raise kind(self._peer, f"{self.name} sent {name}: {why}", time.monotonic() - begin)
            if connection.wait(left):
                parts = connection.socket.recv_multipart(copy=False)
                if parts[0].bytes == asked:
                    return opened(parts)

    def close(self) -> None:
        """Close the connection without waiting for replies."""
        for _, other in self._beside.values():
            other.close()
        self._connection.close()


def opened(parts: Sequence[zmq.Frame]) -> tuple[Reply, list[Buffer]]:
    """Return the reply of a message and the frames that follow it, read-only views of the received data.

    Raises:
        ProtocolError: the reply is malformed.
        AsyncmoeError: the server refused the request; the class is the one that the server raised.
    """
    if len(parts) < 2:
        raise ProtocolError(f"reply: got {len(parts)} frames, expected at least 2")
    reply = decode_reply(parts[1].buffer)
    if isinstance(reply, Refused):
        raise rebuild(reply)
    return reply, [part.buffer.toreadonly() for part in parts[2:]]


def rebuild(refused: Refused) -> AsyncmoeError:
    """Rebuild the controller's error from its class name and text, with exactly the same message.

    Of a `UserError` or `WaitTimeout` only the message crosses the wire; `what` contains all of it. A class that is not in `asyncmoe.errors`
    becomes a `ProtocolError` that names the class.
    """
    kind = getattr(errors, refused.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, AsyncmoeError)):
        return ProtocolError(f"the controller refused with {refused.kind}: {refused.text}")
    error = kind.__new__(kind)
    Exception.__init__(error, refused.text)
    if isinstance(error, UserError):
        error.what, error.got, error.expected, error.hint = refused.text, None, None, None
    elif isinstance(error, TrajectoryRejected):
        error.reason = refused.text.partition(": ")[0]
    elif isinstance(error, WaitTimeout):
        error.whom, error.what, error.seconds = "", refused.text, math.nan
    return error
