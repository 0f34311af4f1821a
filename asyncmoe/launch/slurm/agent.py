"""The trainer ranks of one node of several, in a step of a SLURM job.

A job that failed by a mistake of the user must not go back into the queue, so the step ends with the status of the rank that failed first.
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
    """Run this node's trainer ranks to their end.

    Args:
        node: its number among `nodes`; 0 is where the ranks meet, at `address` and `port`.
        ranks: on this node.
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
    """Raises:
    AsyncmoeError: somebody listens there. Not the user's mistake: the next start of the job takes another port.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise AsyncmoeError(f"port {port}, where the trainer's ranks meet: got one in use, expected a free one; start again") from None
