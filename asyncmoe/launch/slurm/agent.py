"""torchrun on one node of several, with the exit status of the root-cause rank.

torchrun itself exits with 1 for every failure of a rank, but a job that failed by a user error must not be requeued.
"""

from __future__ import annotations

import errno
import os
import socket
import sys

from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch import torchrun
from asyncmoe.process import say


def run(node: int, nodes: int, ranks: int, address: str, port: int, config: str) -> None:
    """Run this node's trainer ranks to their end, then exit with the status of a failure.

    Args:
        node: index of this node among `nodes`; node 0 hosts the rendezvous at `address` and `port`.
        ranks: number of ranks on this node.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in torchrun.TRAINER_ENVIRONMENT.items()})
    try:
        if node == 0:
            check_free(port)
    except AsyncmoeError as error:
        say(error)
        sys.exit(error.exit_code)
    torchrun.run(torchrun.arguments_of(ranks, (address, port), "asyncmoe.trainer", config, node=node, nodes=nodes))


def check_free(port: int) -> None:
    """Check that a port of this node is free.

    Raises:
        AsyncmoeError: the port is in use. Not a user error, because the next start of the job takes another port.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise AsyncmoeError(f"port {port}, where the trainer's ranks meet: got one in use, expected a free one; start again") from None
