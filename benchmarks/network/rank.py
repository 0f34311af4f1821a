"""A rank of the measurement, alone on its host: `python -m benchmarks.network.rank` with a `Job` as JSON on the command line."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.models import family_of
from asyncmoe.receiver.control_store import Store
from asyncmoe.reshard import Exchanger, Moved, RelayExchanger, digest
from asyncmoe.reshard.torch_transport import TorchTransport
from benchmarks.network.cases import DTYPE, Case, layouts, plans
from benchmarks.network.hosts import INTERFACE
from benchmarks.peers import GatherAndBroadcast
from benchmarks.reshard import BASELINES, numbered

DIRECT, RELAY = "shard_to_shard", "shard_to_shard_relay"
_UNWRITTEN = 0xFFFF
_PORT = 29500

Turn = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """What a rank does.

    Attributes:
        case: fields of the `Case`.
        first: address of rank 0.
        ways: `DIRECT`, `RELAY` or one of `benchmarks.reshard.BASELINES`, in order.
        rounds: turns of each.
    """

    case: dict[str, Any]
    rank: int
    first: str
    ways: tuple[str, ...]
    rounds: int
    bucket_bytes: int
    timeout_s: float


@dataclass(frozen=True)
class Counters:
    """What a host has counted since it started: bytes of its interface, segments that TCP sent again, CPU seconds of this process."""

    sent: int
    received: int
    retransmitted: int
    cpu_s: float


def counters() -> Counters:
    """Read them: /proc/net/dev (proc(5)) and snmp of this process's network namespace."""
    device = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith(f"{INTERFACE}:"))
    words = device.partition(":")[2].split()
    names, values = (line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:"))
    return Counters(int(words[8]), int(words[0]), int(values[names.index("RetransSegs")]), time.process_time())


class Rank:
    """Layouts, arrays and process groups of a rank."""

    def __init__(self, job: Job) -> None:
        self._job, self._case = job, Case(**job.case)
        rank, limit = job.rank, job.timeout_s
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        hosted = socket.create_server((job.first, _PORT)) if rank == 0 else None
        self._store = Store("weights", rank, job.first, _PORT, limit, hosted)
        where = f"tcp://{job.first}:{_PORT + 1}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=self._case.world, timeout=timedelta(seconds=limit))
        self._source, self._destination = layouts(self._case)
        self._mine = next(layout for layout in (*self._source, *self._destination) if layout.rank == rank)
        self._sends = rank < self._case.trainers
        self._held = numbered(self._mine) if self._sends else {}
        self._wanted = {} if self._sends else {n: np.zeros(s.size, np.uint16) for n, s in self._mine.storages.items()}
        self._expected = [] if self._sends else self._digests(numbered(self._mine))
        self._groups = 0

    def run(self) -> dict[str, Any]:
        """Every way in turn, round after round; what each turn took, by way."""
        turns = {way: self._prepared(way) for way in self._job.ways}
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in turns}
        for _ in range(self._job.rounds):
            for way, turn in turns.items():
                found[way].append(self._timed(turn))
        return {"turns": found}

    def _timed(self, turn: Turn) -> dict[str, Any]:
        for array in self._wanted.values():
            array.fill(_UNWRITTEN)
        dist.barrier()
        before, started = counters(), time.perf_counter()
        moved = turn()
        dist.barrier()
        seconds, after = time.perf_counter() - started, counters()
        spent = {name: value - getattr(before, name) for name, value in asdict(after).items()}
        phases = moved.seconds if isinstance(moved, Moved) else {}
        return {"seconds": seconds, **spent, "phases": phases, "right": self._digests(self._wanted) == self._expected}

    def _prepared(self, way: str) -> Turn:
        job = self._job
        if way in BASELINES:
            shapes, whole = family_of(self._case.hf).tensors(self._case.hf), family_of(self._case.hf).hf_layout(self._case.hf, DTYPE)
            sides = (self._source, self._destination, self._held, self._wanted)
            return GatherAndBroadcast(shapes, whole, *sides, *BASELINES[way], job.timeout_s).run
        planned = plans(self._case, way == RELAY, ranks=[job.rank])
        transports = [self._transport() for _ in planned]
        numbers: dict[str, Any] = {"bucket_bytes": job.bucket_bytes, "timeout_s": job.timeout_s, "threads": 1}
        made = RelayExchanger(planned, transports, **numbers) if way == RELAY else Exchanger(planned[0], transports[0], **numbers)
        made.bind(self._held, self._wanted)
        return made.run

    def _transport(self) -> TorchTransport:
        """As `asyncmoe.receiver.channel_end.open_gloo` makes it."""
        self._groups += 1
        return TorchTransport(self._store.connect(self._case.world, self._groups, self._job.timeout_s))

    def _digests(self, arrays: dict[str, np.ndarray]) -> list[int]:
        return [digest(arrays[name], threads=1) for name in self._mine.storages] if not self._sends else []


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    rank = Rank(job)
    print(json.dumps(rank.run()), flush=True)
    dist.barrier()
    os._exit(0)  # other ranks' ends are no failures of this one


if __name__ == "__main__":
    main()
