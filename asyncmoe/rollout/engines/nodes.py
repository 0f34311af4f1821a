"""An engine over several machines: the place of each of its nodes, where the ranks of all meet, and several of its nodes on one machine.

The server of node 0 answers HTTP; the servers of the others only hold ranks. A lost node is a lost engine: its ranks wait for each other in
every forward pass.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from asyncmoe.errors import EngineError, UserError
from asyncmoe.rollout.engines.engine import Engine, EngineProcess
from asyncmoe.scratch import Scratch

_POLL_S = 0.2


@dataclass(frozen=True)
class NodePlace:
    """One node of an engine over several.

    Attributes:
        node: its number, from 0.
        meeting: where the ranks of all nodes meet, as torch names it: "tcp://10.1.0.3:29500", or of nodes of one machine "file:///...".
    """

    node: int
    meeting: str


class MeetingPlace:
    """Where the ranks of an engine meet: on one machine a file that only this user reaches, over several a port of this one.

    Attributes:
        url: as `NodePlace.meeting`.

    Args:
        host: address of this machine at which the others reach it; None: all are on this machine.

    Raises:
        StorageError: the file's folder cannot be made.
        UserError: the address is not of this machine.
    """

    def __init__(self, host: str | None) -> None:
        self._scratch = Scratch() if host is None else None
        self._reserved = None if host is None else reserve(host, 0)
        if self._scratch is not None:
            self.url = f"file://{self._scratch.path}/ranks"
        elif self._reserved is not None:
            self.url = f"tcp://{host}:{self._reserved.getsockname()[1]}"

    def close(self) -> None:
        """Give it up, after the ranks have ended. Idempotent."""
        if self._reserved is not None:
            self._reserved.close()
        if self._scratch is not None:
            self._scratch.remove()


def process_name(name: str, node: int) -> str:
    """Return the name, in records and messages, of the process of one node of an engine."""
    return f"{name}.node{node}" if node else name


def reserve(host: str, wanted: int) -> socket.socket:
    """Return a bound socket that reserves the port for the many seconds until a server listens on it.

    The socket never listens, and both sides set SO_REUSEADDR (servers through asyncio, stores through libuv), so Linux lets the server bind
    the port too.

    Args:
        wanted: 0: any free port.

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


class NodesHere:
    """An engine whose nodes are all server processes of this machine; an `asyncmoe.rollout.engines.engine.EngineProcess`.

    Args:
        nodes: the processes, node 0 first.
        meeting: where their ranks meet; closed with the engine.
    """

    def __init__(self, nodes: Sequence[EngineProcess], meeting: MeetingPlace) -> None:
        self._nodes, self._meeting = tuple(nodes), meeting
        head = nodes[0]
        self.name, self.tp, self.ep, self.host, self.url = head.name, head.tp, head.ep, head.host, head.url

    @property
    def client(self) -> Engine:
        """The interface of node 0."""
        return self._nodes[0].client

    @property
    def died(self) -> str | None:
        """Why the first node that ended did, or None while all run."""
        whys = ((number, node.died) for number, node in enumerate(self._nodes))
        return next((f"node {number}: {why}" for number, why in whys if why is not None), None)

    async def wait_ready(self) -> None:
        """As of an `EngineProcess`; a node that ends meanwhile ends the start.

        Raises:
            EngineError: a server died first.
            WaitTimeout: the start took longer than engines.start_timeout_s.
        """
        ready = asyncio.create_task(self._nodes[0].wait_ready())
        try:
            while not ready.done():
                if (why := self.died) is not None:
                    raise EngineError(f"{self.name} did not start: {why}")
                await asyncio.wait([ready], timeout=_POLL_S)
            ready.result()
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    async def stop(self) -> None:
        """End all nodes."""
        await asyncio.gather(*(node.stop() for node in self._nodes))
        self._meeting.close()

    def kill(self) -> None:
        """Kill all nodes, without waiting."""
        for node in self._nodes:
            node.kill()
