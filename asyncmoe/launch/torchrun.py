"""torchrun for the trainer ranks of one machine: `python -m asyncmoe.launch.torchrun ARGUMENTS_OF_TORCHRUN`.

torchrun itself exits with 1 whatever its ranks exit with, and names the first of them in a traceback. This one exits with the status of
the rank that failed first, so that a user's mistake is told from a crash, and reports which rank a signal ended.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.process import KILLED, say

TRAINER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""One OpenMP thread a rank: more ranks than cores would otherwise spin against each other and against the engines."""


def torchrun(ranks: int, master: tuple[str, int], module: str, *arguments: str, node: int = 0, nodes: int = 1) -> list[str]:
    """Arguments of Python for one of a trainer's machines.

    Args:
        ranks: on this machine.
        master: address and free port of the first machine.
        module: what each rank runs.
        node: number of this machine among the trainer's `nodes`.
    """
    return ["-m", "asyncmoe.launch.torchrun", *arguments_of(ranks, master, module, *arguments, node=node, nodes=nodes)]


def arguments_of(ranks: int, master: tuple[str, int], module: str, *arguments: str, node: int = 0, nodes: int = 1) -> list[str]:
    """Arguments of torchrun; see `torchrun`."""
    where = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks)]
    meeting = ["--master-addr", master[0], "--master-port", str(master[1])]
    return [*where, *meeting, "--max-restarts", "0", "-m", module, *arguments]


@dataclass(frozen=True)
class FailedRank:
    """`exitcode`: negative for a signal; `time`: Unix seconds at which torchrun noticed."""

    rank: int
    exitcode: int
    time: int


def run(arguments: Sequence[str]) -> None:
    """Run torchrun in this process; if a rank fails, exit with the status of the rank that failed first."""
    from torch.distributed import run as agent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        agent.main(list(arguments))
    except ChildFailedError as error:
        cause = first([FailedRank(rank, failure.exitcode, failure.timestamp) for rank, failure in error.failures.items()])
        if cause.exitcode < 0:
            number = signal.Signals(-cause.exitcode)
            why = ", as when memory runs out" if number == signal.SIGKILL else ""
            say(AsyncmoeError(f"{KILLED} {number.name}{why}: rank {cause.rank} on {socket.gethostname()}"))
        sys.exit(status(cause.exitcode))
    except SignalException as received:
        sys.exit(status(-received.sigval))


def first(failed: Sequence[FailedRank]) -> FailedRank:
    """The root cause among ranks that failed: a user's mistake, then the earliest; at the same time a signal before an error, which may be
    the loss of that rank. torchrun ends the ranks that are left with SIGTERM, so that comes last."""
    return min(
        failed,
        key=lambda one: (one.exitcode != UserError.exit_code, one.exitcode == -signal.SIGTERM, one.time, one.exitcode > 0, one.rank),
    )


def status(exitcode: int) -> int:
    """The exit status for a process that ended with `exitcode`, which is the number of a signal if negative."""
    return 128 - exitcode if exitcode < 0 else exitcode


def free_port(host: str) -> int:
    """A port of this machine that nobody has now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    run(sys.argv[1:])
