"""torchrun for the trainer ranks of one machine: `python -m asyncmoe.launch.torchrun ARGUMENTS_OF_TORCHRUN`.

torchrun itself exits with 1 for every failure of a rank and reports it in a traceback. This command exits with the status of the root-cause
rank, so that a user error is distinct from a crash, and names a rank ended by a signal.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncmoe import surroundings
from asyncmoe.errors import RECURRING, AsyncmoeError
from asyncmoe.imports import uncollected
from asyncmoe.process import KILLED, say, signalled
from asyncmoe.rpc.environment import AGENT, OWN_THREADS
from asyncmoe.scratch import Scratch

if TYPE_CHECKING:
    from asyncmoe.config import Config

THREADS = "OMP_NUM_THREADS"
_ENVIRONMENT = {THREADS: "1", "TOKENIZERS_PARALLELISM": "false"}
"""One OpenMP thread per rank, because ranks that outnumber the cores would spin against each other and against the engines; more only in
the step of an offloaded optimizer (`asyncmoe.trainer.model.step_threads`)."""


def trainer_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a trainer's ranks.

    Args:
        ours: the starting process's variables, which take precedence.
    """
    found = {name: ours.get(name, value) for name, value in _ENVIRONMENT.items()}
    return found if THREADS in ours else {**found, OWN_THREADS: "1"}


def torchrun(ranks: int, master: tuple[str, int], module: str, *arguments: str, node: int = 0, nodes: int = 1) -> list[str]:
    """Return the Python arguments that start the trainer ranks of one machine.

    Args:
        ranks: number of ranks on this machine.
        master: address and free port of the first machine.
        module: Python module that each rank runs.
        node: index of this machine among the trainer's `nodes` machines.
    """
    where = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks)]
    meeting = ["--master-addr", master[0], "--master-port", str(master[1])]
    return ["-m", "asyncmoe.launch.torchrun", *where, *meeting, "--max-restarts", "0", "-m", module, *arguments]


def trainer_command(config: Config, resolved: Path, module: str = "asyncmoe.trainer", *arguments: str) -> list[str]:
    """Return the command for all trainer ranks on this machine."""
    return [sys.executable, *torchrun(config.trainer.ranks, ("127.0.0.1", free_port("127.0.0.1")), module, str(resolved), *arguments)]


class FailedRank(NamedTuple):
    """`exitcode` is negative for a signal; `time` is when torchrun noticed, in Unix seconds."""

    rank: int
    exitcode: int
    time: int


def run(arguments: Sequence[str]) -> None:
    """Run torchrun in this process; if a rank fails, exit with the status of the root-cause rank."""
    surroundings.settle()
    with uncollected():
        from torch.distributed import run as agent
        from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from asyncmoe.launch import agent_store

    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):  # its ranks block it too (`launch.slurm.task`)
        close: Callable[..., None] = PContext.close
        setattr(PContext, "close", lambda context, *_: close(context, signal.SIGHUP))  # noqa: B010
    scratch = Scratch()
    agent_store.install(scratch.path)
    os.environ.update(scratch.environment())
    os.environ[AGENT] = str(os.getpid())
    tempfile.tempdir = None  # Python caches the previous folder
    try:
        agent.main(list(arguments))
    except ChildFailedError as error:
        cause = first([FailedRank(rank, failure.exitcode, failure.timestamp) for rank, failure in error.failures.items()])
        if cause.exitcode < 0:
            say(AsyncmoeError(f"{KILLED} {signalled(cause.exitcode)}: rank {cause.rank} on {socket.gethostname()}"))
        sys.exit(status(cause.exitcode))
    except AsyncmoeError as error:
        say(error)
        sys.exit(error.exit_code)
    except SignalException as received:
        sys.exit(status(-received.sigval))
    finally:
        scratch.remove()


def first(failed: Sequence[FailedRank]) -> FailedRank:
    """Return the root cause among failed ranks: a failure that would recur, else the earliest.

    If two failures are simultaneous, a signal precedes an error, because the error may report the loss of the rank
    that the signal ended. SIGTERM comes last: torchrun sends it to the remaining ranks.
    """

    def order(one: FailedRank) -> tuple[object, ...]:
        recurs = [*RECURRING, one.exitcode].index(one.exitcode)
        return recurs, one.exitcode == -signal.SIGTERM, one.time, one.exitcode > 0, one.rank

    return min(failed, key=order)


def status(exitcode: int) -> int:
    """Return the shell's exit status for an exit code, which is a negative signal number if a signal ended the process."""
    return 128 - exitcode if exitcode < 0 else exitcode


def free_port(host: str) -> int:
    """Return a TCP port of `host` that is free at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    run(sys.argv[1:])
