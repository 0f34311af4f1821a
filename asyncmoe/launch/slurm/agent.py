"""torchrun on one node of several, with the exit status of the root-cause rank.

torchrun itself exits with 1 for every failure of a rank, but a job that failed by a user error must not be requeued.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Mapping

from torch.distributed import run as agent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.launch.torchrun import TRAINER_ENVIRONMENT, torchrun
from asyncmoe.process import KILLED, say


def run(node: int, nodes: int, ranks: int, address: str, port: int, config: str) -> None:
    """Run this node's trainer ranks to their end, then exit with the status of a failure.

    Args:
        node: index of this node among `nodes`; node 0 hosts the rendezvous at `address` and `port`.
        ranks: number of ranks on this node.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in TRAINER_ENVIRONMENT.items()})
    try:
        if node == 0:
            check_free(port)
        agent.main(torchrun(ranks, (address, port), "asyncmoe.trainer", config, node=node, nodes=nodes)[2:])
    except ChildFailedError as error:
        rank, exitcode = first({rank: failure.exitcode for rank, failure in error.failures.items()})
        if exitcode < 0:
            say(AsyncmoeError(f"{KILLED} {signal.Signals(-exitcode).name}, as when memory runs out: rank {rank}"))
        sys.exit(status(exitcode))
    except SignalException as told:
        sys.exit(status(-told.sigval))
    except AsyncmoeError as error:
        say(error)
        sys.exit(error.exit_code)


def first(failed: Mapping[int, int]) -> tuple[int, int]:
    """Return rank and exit code of the root cause among ranks that failed together: a user error first, then a rank that a signal ended.

    Args:
        failed: exit code by rank.
    """
    return min(failed.items(), key=lambda end: (end[1] != UserError.exit_code, end[1] > 0, end[0]))


def status(exitcode: int) -> int:
    """Return the shell's exit status for an exit code, which is a negative signal number if a signal ended the process."""
    return 128 - exitcode if exitcode < 0 else exitcode


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
