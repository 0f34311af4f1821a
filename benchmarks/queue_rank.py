"""A trainer's rank that takes its half of every step from a queue: a process of `benchmarks.queue`.

On standard input it gets a `Job` as one line, and "go" when all ranks are ready; on standard output it writes "ready" and a `Took`.
Wherever the bytes come from, a rank does the same with them: `asyncmoe.trajectory.decode`, which checks every digest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from asyncmoe.config.queue import QueueSection
from asyncmoe.payloads.opening import open_store
from asyncmoe.rpc import held
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import Commit, Fetch, Lease, Leased
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.trajectory import decode, frames_in

RANKS = 2
STREAM, GROUP = "queue", "trainer"
"""Names in Redis."""
_TIMEOUT_S = 120.0
_BLOCK_MS = 10_000


class Job(msgspec.Struct, frozen=True):
    """What a rank is to do; `where` is a rendezvous as JSON, or the port of Redis."""

    kind: Literal["asyncmoe", "redis"]
    where: str
    rank: int
    steps: int
    batch: int
    ask: int
    """Trajectories of one request."""
    store: str = ""
    """The section `queue` of a configuration as JSON, whose store has the trajectories; empty: the controller has them."""


class Took(msgspec.Struct, frozen=True):
    """`begin` and `end` on the machine's monotonic clock; `processor`: seconds in between, of this process."""

    begin: float
    end: float
    processor: float
    requests: int
    trajectories: int
    tokens: int
    bytes: int


class _Count:
    def __init__(self) -> None:
        self.requests = self.trajectories = self.tokens = self.bytes = 0

    def take(self, frames: list[Any]) -> None:
        """One trajectory."""
        self.tokens += len(decode(frames))
        self.trajectories += 1
        self.bytes += sum(memoryview(frame).nbytes for frame in frames)


def _asyncmoe(job: Job) -> Callable[[_Count], None]:
    client = Client(msgspec.json.decode(job.where, type=Rendezvous), f"rank.{job.rank}")
    if job.store:
        client.reads(lambda: open_store(QueueSection.model_validate_json(job.store)))
        _ = client.store

    def work(count: _Count) -> None:
        each = frames_in(1)
        for step in range(job.steps):
            leased = client.ask(Lease(step, "rl", job.batch, step, _TIMEOUT_S), _TIMEOUT_S)[0]
            assert isinstance(leased, Leased)
            items = leased.items[job.rank :: RANKS]
            for i in range(0, len(items), job.ask):
                wanted = items[i : i + job.ask]
                asked = Fetch(step, tuple(item.key for item in wanted))
                frames = held.fetch(client, asked, wanted, leased.holders, _TIMEOUT_S)
                for j in range(len(wanted)):
                    count.take(list(frames[j * each : (j + 1) * each]))
                count.requests += 1
            client.ask(Commit(step), _TIMEOUT_S)
            count.requests += 2

    return work


def _redis(job: Job) -> Callable[[_Count], None]:
    import redis

    server = redis.Redis(port=int(job.where), socket_timeout=_TIMEOUT_S)
    server.ping()

    def work(count: _Count) -> None:
        left = job.steps * job.batch // RANKS
        while left:
            found: Any = server.xreadgroup(GROUP, f"rank.{job.rank}", {STREAM: ">"}, count=min(job.ask, left), block=_BLOCK_MS)
            entries = found[0][1]
            for _, fields in entries:
                count.take([fields[str(i).encode()] for i in range(frames_in(1))])
            names = [name for name, _ in entries]
            server.pipeline(transaction=False).xack(STREAM, GROUP, *names).xdel(STREAM, *names).execute()
            left -= len(entries)
            count.requests += 2

    return work


def main() -> None:
    """One job."""
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    work = {"asyncmoe": _asyncmoe, "redis": _redis}[job.kind](job)
    print("ready", flush=True)
    sys.stdin.readline()
    count, begin, spent = _Count(), time.monotonic(), time.process_time()
    work(count)
    took = Took(begin, time.monotonic(), time.process_time() - spent, count.requests, count.trajectories, count.tokens, count.bytes)
    print(msgspec.json.encode(took).decode(), flush=True)


if __name__ == "__main__":
    main()
