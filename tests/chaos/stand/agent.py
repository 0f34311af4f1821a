"""Stands in for torchrun: starts the ranks, ends all when one fails, and reports which failed first and why."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.torchrun import FailedRank, first, status
from asyncmoe.process import KILLED, die_with_parent, say

_GRACE_S = 2.0


def main(file: str, world: int) -> None:
    """Run `world` ranks to their end; exit with the status of the root cause."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    environment = {**os.environ, "WORLD_SIZE": str(world)}
    command = [sys.executable, "-m", "tests.chaos.stand.rank", file]
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(world)]
    try:
        while all(rank.poll() in (None, 0) for rank in ranks):
            if all(rank.poll() == 0 for rank in ranks):
                return
            time.sleep(0.02)
        time.sleep(0.1)
        failed = [FailedRank(at, rank.returncode, 0) for at, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
    finally:
        _end(ranks)
    cause = first(failed)
    if cause.exitcode < 0:
        number = signal.Signals(-cause.exitcode)
        why = ", as when memory runs out" if number == signal.SIGKILL else ""
        say(AsyncmoeError(f"{KILLED} {number.name}{why}: rank {cause.rank} on {socket.gethostname()}"))
    sys.exit(status(cause.exitcode))


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()
    until = time.monotonic() + _GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.01, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
