"""torchrun on one node of several, ending with the status of its rank that failed first.

torchrun itself ends with 1 whatever its ranks end with, and a job that failed by a mistake of the user must not go back into the queue.
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
    """Run this node's trainer ranks to their end.

    Args:
        node: its number among `nodes`; 0 is where the ranks meet, at `address` and `port`.
        ranks: on this node.
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
    """Of ranks that failed at the same time, by what they ended with, the one that the others follow from: a user's mistake, then one
    that a signal ended."""
    return min(failed.items(), key=lambda end: (end[1] != UserError.exit_code, end[1] > 0, end[0]))


def status(exitcode: int) -> int:
    """Of a process that ended with `exitcode`, which is the number of a signal where it is negative."""
    return 128 - exitcode if exitcode < 0 else exitcode


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
