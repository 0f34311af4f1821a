"""Weights from four trainer ranks to two engine ranks, in real processes of this machine: shard to shard against gather-and-broadcast."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from asyncmoe.errors import InvariantBroken, TransferError, WaitTimeout
from asyncmoe.models import family_of
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.reshard import Exchanger, Moved, RankLayout, digest, plan
from asyncmoe.reshard.shm_transport import ShmTransport
from benchmarks.copies import copy_rates
from benchmarks.memory import Growth
from benchmarks.others import obstacles
from benchmarks.provenance import here
from benchmarks.published import REAL

BUCKET_BYTES = 16 << 20
"""Bucket of shard-to-shard transfers: larger messages do not stay in a core's cache until they are sent; smaller ones wait more often."""
PEER_BUCKET_BYTES = 16 << 20
"""Bucket of the flattened-bucket broadcast: its fastest on CPU of 16, 64 and 256 MiB (on GPUs, 256 MiB and more are customary)."""
OURS = ("shm", "gloo")
BASELINES = {
    "per_tensor": (1, True),
    "flattened_bucket": (PEER_BUCKET_BYTES, True),
    "flattened_bucket_one_gatherer": (PEER_BUCKET_BYTES, False),
}
"""Bytes of a bucket, and whether every trainer rank gathers, as in an all-gather, or rank 0 alone, which is possible but not used."""
ROUNDS = 5
_DTYPE = "bfloat16"
_TIMEOUT_S = 300.0

Arrays = dict[str, np.ndarray]

MODEL: dict[str, Any] = {**REAL["Qwen3-30B-A3B"], "num_hidden_layers": 4, "num_experts": 24, "vocab_size": 16384}
"""Qwen3-30B-A3B's widths with fewer layers, experts and tokens: about 1.1 GB in bfloat16."""

CASES = {
    "tp2xep2 -> tp2": (MegatronParallel(tp=2, ep=2, dp=2), EngineParallel(tp=2)),
    "pp2xep2 -> tp2ep2": (MegatronParallel(pp=2, ep=2, dp=2), EngineParallel(tp=2, ep=2)),
}


def layouts(hf: dict[str, Any], trainer: MegatronParallel, engine: EngineParallel) -> tuple[list[RankLayout], list[RankLayout]]:
    """Trainer ranks, followed by engine ranks."""
    family = family_of(hf)
    source = [family.megatron_layout(hf, trainer, rank, _DTYPE) for rank in range(trainer.world)]
    destination = [family.sglang_layout(hf, engine, rank, _DTYPE).at(trainer.world + rank) for rank in range(engine.tp)]
    return source, destination


def run(hf: dict[str, Any] | None = None, rounds: int = ROUNDS) -> dict[str, Any]:
    """Run all cases, one after the other.

    Within a case every way is prepared first; then the ways alternate in every round, on the same arrays, so that other load on the
    machine affects all equally. Every process has one copy thread and is pinned to one core.

    Returns:
        {"date", "machine", "load", "rounds", "model", "copies", "not_run", "cases"}; "copies" is the result of `copy_rates`, "not_run"
        says why other systems are not among the baselines. A case has "name",
        "transport", "bytes_wire", "bytes_lower_bound" (size of the engine ranks' weights); "seconds", medians over the rounds ("plan" and
        "prepare" are needed once; "pack", "wire", "unpack" and "commit" are the slowest rank's; "verify" is 0, because digests
        are computed while packing and unpacking; "total" is from barrier to barrier); "baseline_seconds" and "speedup" by
        the names of `BASELINES`; "peak_extra_bytes", the largest rise of a rank's resident memory, shared memory included, over
        its size with layouts, plan and arrays, and "buffer_bytes", the part of its message buffers.

    Raises:
        InvariantBroken: two ways delivered different bytes.
        TransferError: a process died.
        WaitTimeout: processes did not finish.
    """
    measured_at = here()
    hf = hf or MODEL
    cases = [found for name in CASES for found in case(hf, name, rounds)]
    source, destination = layouts(hf, *CASES["tp2xep2 -> tp2"])
    made = plan(family_of(hf).tensors(hf), source, destination)
    copies = copy_rates(made, 0, destination[0].rank, BUCKET_BYTES, rounds)
    keys = ("hidden_size", "num_hidden_layers", "num_experts", "moe_intermediate_size", "vocab_size")
    return {
        **measured_at,
        "rounds": rounds,
        "model": {key: hf[key] for key in keys},
        "copies": copies,
        "not_run": obstacles(),
        "cases": cases,
    }


def case(hf: dict[str, Any], name: str, rounds: int) -> list[dict[str, Any]]:
    """Run one of `CASES` over each transport; see `run`."""
    trainer, engine = CASES[name]
    world = trainer.world + engine.tp
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[int, dict[str, Any]]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        session = f"bench-{secrets.token_hex(6)}"
        arguments = (world, hf, name, rounds, str(Path(folder, "store")), session, results)
        processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        try:
            found = dict(_collect(results, processes) for _ in range(world))
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
    return _summaries(hf, name, found)


def _collect(results: Any, processes: list[Any]) -> tuple[int, dict[str, Any]]:
    deadline = time.monotonic() + 2 * _TIMEOUT_S
    while results.empty():
        dead = [i for i, process in enumerate(processes) if process.exitcode not in (None, 0)]
        if dead:
            raise TransferError(dead[0], dead[0], "the process of this rank died; its error is above")
        if time.monotonic() > deadline:
            raise WaitTimeout("the ranks of the measurement", "their results", 2 * _TIMEOUT_S)
        time.sleep(0.05)
    rank, measured = results.get()
    return int(rank), measured


def _rank(rank: int, world: int, hf: dict[str, Any], name: str, rounds: int, store: str, session: str, results: Any) -> None:
    """Run one process: each way in turn, on the same arrays."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    limit = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    ways = _Ways(rank, hf, name, session)
    out: dict[str, Any] = {"plan": ways.planning, "digests": {}, "total": {}, "moved": {}, "prepare": {}, "buffers": {}, "extra": {}}
    turns: dict[str, Turn] = {}
    for way in (*OURS, *BASELINES):
        growth = Growth()
        started = time.perf_counter()
        turns[way] = ways.prepared(way)
        out["prepare"][way] = time.perf_counter() - started
        for _ in range(2):  # to warm up, and to measure the peak
            _timed(turns[way], ways.staging, dist.barrier)
        out["extra"][way] = growth.peak_bytes()
        out["digests"][way] = [digest(array, threads=1) for array in ways.staging.values()]
        out["total"][way], out["moved"][way] = [], []
    for number in range(rounds):
        order = list(turns)
        for way in order[number % len(order) :] + order[: number % len(order)]:
            seconds, moved = _timed(turns[way], ways.staging, dist.barrier)
            out["total"][way].append(seconds)
            out["moved"][way].append(moved)
    out["buffers"] = ways.close()
    results.put((rank, out))
    dist.barrier()
    dist.destroy_process_group()


Turn = Callable[[], Moved | None]


class _Ways:
    """The ways of one rank, with their common layouts, plan and arrays."""

    def __init__(self, rank: int, hf: dict[str, Any], name: str, session: str) -> None:
        self._rank, self._hf, self._session = rank, hf, session
        self._source, self._destination = layouts(hf, *CASES[name])
        self._shapes = family_of(hf).tensors(hf)
        started = time.perf_counter()
        self._plan = plan(self._shapes, self._source, self._destination, ranks=[rank])
        self.planning = time.perf_counter() - started
        mine = next(layout for layout in (*self._source, *self._destination) if layout.rank == rank)
        self._held = numbered(mine) if rank < len(self._source) else {}
        wanted = mine.storages if rank >= len(self._source) else {}
        self.staging = {n: np.ones(s.size, np.uint16) for n, s in wanted.items()}
        self._live: Arrays = {}
        self._ours: dict[str, Exchanger] = {}
        self._peers: list[Any] = []

    def prepared(self, way: str) -> Turn:
        """Return a function that transfers the weights once."""
        if way in OURS:
            return self._prepare_ours(way)
        from benchmarks.peers import GatherAndBroadcast

        whole = family_of(self._hf).hf_layout(self._hf, _DTYPE)
        sides = (self._source, self._destination, self._held, self.staging)
        peer = GatherAndBroadcast(self._shapes, whole, *sides, *BASELINES[way], _TIMEOUT_S)
        self._peers.append(peer)
        return peer.run

    def _prepare_ours(self, way: str) -> Turn:
        from asyncmoe.reshard.torch_transport import TorchTransport

        transport = ShmTransport(self._rank, self._session) if way == "shm" else TorchTransport()
        exchanger = Exchanger(self._plan, transport, bucket_bytes=BUCKET_BYTES, timeout_s=_TIMEOUT_S, threads=1)
        exchanger.bind(self._held, self.staging)
        self._ours[way] = exchanger

        def update() -> Moved:
            moved = exchanger.run()
            started = time.perf_counter()
            self._live.update(self.staging)  # a commit that swaps storage: names point to the new arrays
            moved.seconds["commit"] = time.perf_counter() - started
            return moved

        return update

    def close(self) -> dict[str, int]:
        """Free everything; return the bytes of message buffers by way."""
        for peer in self._peers:
            peer.close()
        for exchanger in self._ours.values():
            exchanger.close()
        return {way: exchanger.buffer_bytes for way, exchanger in self._ours.items()}


def _timed(turn: Turn, staging: Arrays, barrier: Callable[[], object]) -> tuple[float, Moved | None]:
    """Return the seconds from barrier to barrier."""
    for array in staging.values():
        array.fill(0)
    barrier()
    started = time.perf_counter()
    moved = turn()
    barrier()
    return time.perf_counter() - started, moved


def numbered(layout: RankLayout) -> Arrays:
    """Return contents by storage name; replicas on different ranks must agree, so all storages of one name have equal rows."""
    arrays = {}
    for name, storage in layout.storages.items():
        arrays[name] = np.zeros(storage.size, np.uint16)
    values = {piece.tensor: sum(piece.tensor.encode()) % 60000 + 1 for piece in layout.pieces}
    for piece in layout.pieces:
        steps = [2 * s for s in piece.strides]
        view = np.lib.stride_tricks.as_strided(arrays[piece.storage][piece.offset :], piece.box.extent, steps)
        column = np.arange(piece.box.start[-1], piece.box.start[-1] + piece.box.extent[-1], dtype=np.uint16)
        row = np.arange(piece.box.start[0], piece.box.start[0] + piece.box.extent[0], dtype=np.uint16)
        view[...] = column + values[piece.tensor] + (257 * row[:, None] if len(piece.box.extent) > 1 else 0)
    return arrays


def _summaries(hf: dict[str, Any], name: str, found: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    for rank, measured in found.items():
        if len({tuple(digests) for digests in measured["digests"].values()}) != 1:
            raise InvariantBroken(f"{name}: rank {rank} got different bytes by different ways")
    _, destination = layouts(hf, *CASES[name])
    bound = sum(storage.nbytes for layout in destination for storage in layout.storages.values())
    return [_summary(name, way, bound, found) for way in OURS]


def _summary(name: str, way: str, bound: int, found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    totals = found[0]["total"]
    baselines = {baseline: median(totals[baseline]) for baseline in BASELINES}
    seconds = {"plan": max(m["plan"] for m in found.values()), "prepare": max(m["prepare"][way] for m in found.values())}
    for phase in ("pack", "wire", "unpack", "commit"):
        seconds[phase] = max(median(moved.seconds[phase] for moved in m["moved"][way]) for m in found.values())
    total = median(totals[way])
    return {
        "name": name,
        "transport": way,
        "bytes_wire": sum(m["moved"][way][-1].sent for m in found.values()),
        "bytes_lower_bound": bound,
        "seconds": {**seconds, "verify": 0.0, "total": total},
        "baseline_seconds": baselines,
        "speedup": {baseline: median(a / b for a, b in zip(totals[baseline], totals[way], strict=True)) for baseline in BASELINES},
        "peak_extra_bytes": max(m["extra"][way] for m in found.values()),
        "buffer_bytes": max(m["buffers"][way] for m in found.values()),
    }
