"""A rank of the measurement, alone on its host: `python -m benchmarks.network.rank` with a `Job` as JSON on the command line."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.models import family_of
from asyncmoe.reshard import Moved, Plan, digest
from asyncmoe.reshard.torch_transport import TorchTransport
from asyncmoe.weights.receiver.control_store import Store
from benchmarks.network.cases import DTYPE, Case, layouts, planned
from benchmarks.network.counters import timed
from benchmarks.network.deltas import ClockedExchanger, DeltaRank
from benchmarks.network.hosts import INTERFACE
from benchmarks.peers import GatherAndBroadcast
from benchmarks.reshard import BASELINES, numbered

DIRECT = "shard_to_shard"
_UNWRITTEN = 0xFFFF
_PORT = 29500

Turn = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """What a rank does.

    Attributes:
        case: fields of the `Case`.
        first: address of rank 0.
        ways: `DIRECT` or one of `benchmarks.reshard.BASELINES`, in order.
        rounds: turns of each.
        changed: percents of the weights that change from version to version, for deltas; empty: none are measured.
    """

    case: dict[str, Any]
    rank: int
    first: str
    ways: tuple[str, ...]
    rounds: int
    changed: tuple[float, ...]
    bucket_bytes: int
    timeout_s: float


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
        self._direct: tuple[Plan, ClockedExchanger] | None = None

    def run(self) -> dict[str, Any]:
        """Every way in turn, round after round; what each turn took, by way. Then the deltas, if there are any (`DeltaRank.run`)."""
        found = {"turns": self._ways()}
        if not self._job.changed:
            return found
        weights, self._wanted = self._wanted, {}  # the deltas' memory from here on
        assert self._direct is not None
        made, exchanger = self._direct
        deltas = DeltaRank(
            self._case, made, exchanger, self._store, self._mine, self._held, weights, self._job.timeout_s, self._job.bucket_bytes
        )
        del weights
        return {**found, "deltas": deltas.run(self._job.changed, self._job.rounds)}

    def _ways(self) -> dict[str, list[dict[str, Any]]]:
        turns = {way: self._prepared(way) for way in self._job.ways}
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in turns}
        for _ in range(self._job.rounds):
            for way, turn in turns.items():
                found[way].append(self._timed(turn))
        return found

    def _timed(self, turn: Turn) -> dict[str, Any]:
        for array in self._wanted.values():
            array.fill(_UNWRITTEN)
        moved, spent = timed(turn)
        phases = moved.seconds if isinstance(moved, Moved) else {}
        return {**spent, "phases": phases, "right": self._digests(self._wanted) == self._expected}

    def _prepared(self, way: str) -> Turn:
        job = self._job
        if way in BASELINES:
            shapes, whole = family_of(self._case.hf).tensors(self._case.hf), family_of(self._case.hf).hf_layout(self._case.hf, DTYPE)
            sides = (self._source, self._destination, self._held, self._wanted)
            return GatherAndBroadcast(shapes, whole, *sides, *BASELINES[way], job.timeout_s).run
        made = planned(self._case, ranks=[job.rank])
        # As `asyncmoe.weights.receiver.channel_end.open_gloo` makes it.
        transport = TorchTransport(self._store.connect(self._case.world, 1, job.timeout_s))
        exchanger = ClockedExchanger(
            made, transport, bucket_bytes=job.bucket_bytes, timeout_s=job.timeout_s, threads=1, delta=bool(job.changed)
        )
        exchanger.bind(self._held, self._wanted)
        self._direct = made, exchanger
        return exchanger.run

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
