"""A case of the queue's benchmark: its sizes, its rank processes, and the figures they make."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from asyncmoe.errors import InvariantBroken, WaitTimeout
from benchmarks.queue_rank import RANKS, Job, Took

READY_S, WORK_S = 120.0, 300.0


@dataclass(frozen=True)
class QueueCase:
    """Of one case; `ask`: trajectories a rank asks for at once."""

    steps: int = 4
    batch: int = 256
    tokens: int = 4096
    ask: int = 16


def figures(took: Sequence[Took], server_s: float, put_s: float) -> dict[str, float]:
    """What two ranks and a server did, as rates; `put_s` is what filling took."""
    wall = max(t.end for t in took) - min(t.begin for t in took)
    count, size = sum(t.trajectories for t in took), sum(t.bytes for t in took)
    return {
        "trajectories_per_s": count / wall,
        "GBps": size / wall / 1e9,
        "requests_per_s": sum(t.requests for t in took) / wall,
        "put_per_s": count / put_s,
        "processor_s_per_GB": (server_s + sum(t.processor for t in took)) / size * 1e9,
    }


def expect_all(took: Sequence[Took], sizes: QueueCase) -> None:
    """Raises InvariantBroken unless everything that was put came out."""
    got = [(t.trajectories, t.tokens) for t in took]
    each = sizes.steps * sizes.batch // RANKS
    if got != [(each, each * sizes.tokens)] * RANKS:
        raise InvariantBroken(f"bench queue: got (trajectories, tokens) {got}, expected ({each}, {each * sizes.tokens}) a rank")


class Ranks:
    """The rank processes of one measurement."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    @staticmethod
    async def start(jobs: Sequence[Job]) -> Ranks:
        """Returns when all are ready. WaitTimeout, naming the rank, if one is not."""
        command = (sys.executable, "-m", "benchmarks.queue_rank")
        pipe = asyncio.subprocess.PIPE
        ranks = Ranks([await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in jobs])
        for number, job in enumerate(jobs):
            ranks._tell(number, msgspec.json.encode(job) + b"\n")
        for number in range(len(jobs)):
            await ranks._line(number, READY_S, "to be ready")
        return ranks

    async def go(self) -> list[Took]:
        """Let them work, and wait for what they say."""
        for number in range(len(self._processes)):
            self._tell(number, b"go\n")
        lines = [await self._line(number, WORK_S, "to finish") for number in range(len(self._processes))]
        return [msgspec.json.decode(line, type=Took) for line in lines]

    async def end(self) -> None:
        """Kill those that still run."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _tell(self, number: int, line: bytes) -> None:
        stdin = self._processes[number].stdin
        assert stdin is not None
        stdin.write(line)

    async def _line(self, number: int, limit_s: float, what: str) -> bytes:
        stdout = self._processes[number].stdout
        assert stdout is not None
        try:
            line = await asyncio.wait_for(stdout.readline(), limit_s)
        except TimeoutError:
            line = b""
        if not line:
            await self.end()
            raise WaitTimeout(f"rank {number} of the bench", f"{what}; see what it wrote", limit_s)
        return line
