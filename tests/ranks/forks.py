"""Forks the ranks of worker scripts from one process that has imported what they import: `python -m tests.ranks.forks`.

A session of tests starts about a hundred ranks, and torch, Megatron and transformers take some six seconds of CPU time to import, longer
than most scripts compute. A rank is a process like torchrun's: it has torchrun's variables, meets the others in a store of its launch, and
if one fails the others are killed.

A line of JSON on standard input is a `Job`; the answers, a line each, are the number of its process group and, when it has ended, its exit
status. At the end of the input the job under way is killed.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import peft  # noqa: F401  this and what follows are what the scripts import, or what they use imports
import pytest  # noqa: F401
import torch.distributed as dist
import transformers  # noqa: F401

from asyncmoe.process import die_with_parent, freeze, leave
from asyncmoe.trainer import export  # noqa: F401
from asyncmoe.trainer.model import checkpoint_saver, replay  # noqa: F401
from asyncmoe.weights.sender import reshard  # noqa: F401

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """One launch.

    Attributes:
        script: the file that every rank runs.
        arguments: of the script.
        ranks: number of ranks.
        log: the file that all of them write to.
        environment: their variables, except those set by torchrun.
    """

    script: str
    arguments: list[str]
    ranks: int
    log: str
    environment: dict[str, str]


def main() -> None:
    freeze()
    while line := sys.stdin.buffer.readline():
        job = Job(**json.loads(line))
        threads = len(list(Path("/proc/self/task").iterdir()))
        assert threads == 1, f"{threads} threads: a forked process has only one of them, and perhaps locks of the others"
        parent, group = os.getpid(), os.fork()
        if group == 0:
            _launch(job, parent)
        print(group, flush=True)
        print(_ended(group), flush=True)


def _ended(group: int) -> int:
    """Wait for the end of a job, or of the input, which ends the job; return its status."""
    handle = os.pidfd_open(group)
    ready, _, _ = select.select([handle, sys.stdin], [], [])
    os.close(handle)
    if sys.stdin in ready:
        with suppress(ProcessLookupError):  # it has not called setsid yet; then it ends with this process
            os.killpg(group, signal.SIGKILL)
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(group, 0)[1])


def _launch(job: Job, parent: int) -> NoReturn:
    """Start the ranks and wait for them, as torchrun does, in a process group of this job."""
    os.setsid()
    die_with_parent(parent)
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, descriptor)
    os.environ.clear()
    os.environ.update(job.environment)
    listener = socket.create_server((_HOST, 0))
    here, ranks = os.getpid(), set()
    for rank in range(job.ranks):
        if (pid := os.fork()) == 0:
            port = listener.getsockname()[1]
            listener.close()
            _run(job, rank, port, here)
        ranks.add(pid)
    store = dist.TCPStore(  # noqa: F841  it lives as long as the ranks
        _HOST, listener.getsockname()[1], is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    leave(_first_failure(ranks))


def _first_failure(ranks: set[int]) -> int:
    """Wait for all ranks; return 0, or the status of the first that failed, after which the others are killed."""
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if code := os.waitstatus_to_exitcode(status):
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return code if code > 0 else 128 - code
    return 0


def _run(job: Job, rank: int, port: int, parent: int) -> NoReturn:
    """Run as a rank."""
    die_with_parent(parent)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks}
    met = {"MASTER_ADDR": _HOST, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in (places | met).items()})
    sys.argv = [job.script, *job.arguments]
    try:
        runpy.run_path(job.script, run_name="__main__")  # which leaves by itself (`group.run`)
    except BaseException:  # noqa: BLE001  a forked process must not go on as if it were its parent
        print(f"rank {rank}:", file=sys.stderr)
        traceback.print_exc()
    leave(1)


if __name__ == "__main__":
    main()
