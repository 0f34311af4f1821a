"""torchrun on one node of several, ending with the status of the rank that failed first.

torchrun itself ends with 1 whatever its ranks end with, and a job that failed by a mistake of the user must not go back into the queue.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.local import TRAINER_ENVIRONMENT
from asyncmoe.process import ERROR_PREFIX

_ENVIRONMENT = {**TRAINER_ENVIRONMENT, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""The last one so that Megatron's tensor-parallel collectives begin before the products they overlap with (megatron-core's
`LinearWithGradAccumulationAndAsyncCommunication`). The user's own values win."""


def run(node: int, nodes: int, ranks: int, address: str, port: int, config: str) -> None:
    """Run this node's trainer ranks to their end.

    Args:
        node: its number among `nodes`; 0 is where the ranks meet, at `address` and `port`.
        ranks: on this node.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})
    try:
        if node == 0:
            check_free(port)
        torchrun.main(command(node, nodes, ranks, address, port, config))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"{ERROR_PREFIX}rank {rank} was ended by {name}; was it the node's memory? (dmesg)", file=sys.stderr, flush=True)
        sys.exit(status(failure.exitcode))
    except AsyncmoeError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def command(node: int, nodes: int, ranks: int, address: str, port: int, config: str) -> list[str]:
    """torchrun's arguments."""
    shape = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks), "--max-restarts", "0"]
    return [*shape, "--master-addr", address, "--master-port", str(port), "-m", "asyncmoe.trainer", config]


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
