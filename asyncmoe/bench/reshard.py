"""Weights from four trainer ranks to two engine ranks, in real processes of this machine: ours against gather-and-broadcast."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from asyncmoe.errors import InvariantBroken, TransferError, WaitTimeout
from asyncmoe.models import family_of
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.reshard import Exchanger, Plan, RankLayout, digest, plan
from asyncmoe.reshard.shm_transport import ShmTransport

BUCKET_BYTES = 64 << 20
PEER_BUCKET_BYTES = 256 << 20
"""Of the flattened-bucket broadcast: large, as it is faster that way."""
ROUNDS = 3
_DTYPE = "bfloat16"
_TIMEOUT_S = 300.0

Arrays = dict[str, np.ndarray]

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 16384,
    "num_experts": 24,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "attention_bias": False,
}
"""Qwen3-30B-A3B's widths with fewer layers, experts and tokens: about 1.1 GB in bfloat16."""

CASES = {
    "tp2xep2 -> tp2": (MegatronParallel(tp=2, ep=2, dp=2), EngineParallel(tp=2)),
    "pp2xep2 -> tp2ep2": (MegatronParallel(pp=2, ep=2, dp=2), EngineParallel(tp=2, ep=2)),
}


def layouts(hf: dict[str, Any], trainer: MegatronParallel, engine: EngineParallel) -> tuple[list[RankLayout], list[RankLayout]]:
    """Trainer ranks, and engine ranks after them."""
    family = family_of(hf)
    source = [family.megatron_layout(hf, trainer, rank, _DTYPE) for rank in range(trainer.world)]
    destination = [family.sglang_layout(hf, engine, rank, _DTYPE).at(trainer.world + rank) for rank in range(engine.tp)]
    return source, destination


def run(hf: dict[str, Any] | None = None, rounds: int = ROUNDS) -> dict[str, Any]:
    """All cases, one after the other.

    Returns:
        {"date", "machine", "model", "copies", "cases"}. A case has "name", "transport", "bytes_wire", "bytes_lower_bound" (what
        the engine ranks hold), "seconds" (median round: "plan" and "prepare" once before, "pack", "wire", "unpack" and
        "commit" of the slowest rank, "verify" is part of pack and unpack, "total" between two barriers),
        "baseline_seconds" and "speedup" by baseline, "peak_extra_bytes" (message buffers of the rank with most).

    Raises:
        InvariantBroken: two ways brought different bytes.
        TransferError: a process that died.
        WaitTimeout: processes that did not finish.
    """
    hf = hf or MODEL
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    cases = [found for name in CASES for found in case(hf, name, rounds)]
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    shown = {key: hf[key] for key in ("hidden_size", "num_hidden_layers", "num_experts", "moe_intermediate_size", "vocab_size")}
    return {"date": date, "machine": machine, "model": shown, "copies": copy_rates(hf), "cases": cases}


def case(hf: dict[str, Any], name: str, rounds: int) -> list[dict[str, Any]]:
    """One of `CASES`, over each transport; see `run`."""
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
    """One process: each way in turn, on the same arrays."""
    import torch
    import torch.distributed as dist

    from asyncmoe.bench.peers import GatherAndBroadcast
    from asyncmoe.reshard.torch_transport import TorchTransport

    torch.set_num_threads(1)
    limit = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    family, (source, destination) = family_of(hf), layouts(hf, *CASES[name])
    shapes = family.tensors(hf)
    started = time.perf_counter()
    made = plan(shapes, source, destination)
    planning = time.perf_counter() - started
    mine = next(layout for layout in (*source, *destination) if layout.rank == rank)
    held = _random(source[rank]) if rank < len(source) else {}
    staging = {n: np.ones(s.size, np.uint16) for n, s in mine.storages.items()} if rank >= len(source) else {}
    out: dict[str, Any] = {"plan": planning, "digests": {}}
    for way, transport in (("shm", ShmTransport(rank, session)), ("gloo", TorchTransport())):
        started = time.perf_counter()
        exchanger = Exchanger(made, transport, bucket_bytes=BUCKET_BYTES, timeout_s=_TIMEOUT_S, threads=1)
        exchanger.bind(held, staging)
        prepare = time.perf_counter() - started
        out[way] = _measured(exchanger, staging, rounds, dist.barrier)
        out[way] |= {"prepare": prepare, "buffers": exchanger.buffer_bytes}
        out["digests"][way] = _digests(staging)
        exchanger.close()
    for way, bucket_bytes in (("per_tensor", 1), ("flattened_bucket", PEER_BUCKET_BYTES)):
        peer = GatherAndBroadcast(shapes, family.hf_layout(hf, _DTYPE), source, destination, held, staging, bucket_bytes, _TIMEOUT_S)
        out[way] = _timed(peer.run, staging, rounds, dist.barrier)
        out["digests"][way] = _digests(staging)
        peer.close()
    results.put((rank, out))
    dist.barrier()
    dist.destroy_process_group()


def _timed(run: Callable[[], object], staging: Arrays, rounds: int, barrier: Callable[[], object]) -> list[float]:
    """Seconds of each round from barrier to barrier, after one to warm up."""
    seconds = []
    for _ in range(rounds + 1):
        for array in staging.values():
            array.fill(0)
        barrier()
        started = time.perf_counter()
        run()
        barrier()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def _measured(exchanger: Exchanger, staging: Arrays, rounds: int, barrier: Callable[[], object]) -> dict[str, Any]:
    phases: list[dict[str, float]] = []
    sent: list[int] = []
    live: Arrays = {}

    def update() -> None:
        moved = exchanger.run()
        started = time.perf_counter()
        live.update(staging)  # the engine's side of a commit where storage may be exchanged: names point to the new arrays
        phases.append({**moved.seconds, "commit": time.perf_counter() - started})
        sent.append(moved.sent)

    return {"total": _timed(update, staging, rounds, barrier), "phases": phases[1:], "sent": sent[-1]}


def _random(layout: RankLayout) -> Arrays:
    """Contents by storage name; replicas on different ranks must agree, so every row of storages of one name is the same."""
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


def _digests(staging: Arrays) -> list[int]:
    return [digest(array, threads=1) for array in staging.values()]


def _summaries(hf: dict[str, Any], name: str, found: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    for rank, measured in found.items():
        if len({tuple(digests) for digests in measured["digests"].values()}) != 1:
            raise InvariantBroken(f"{name}: rank {rank} was brought different bytes by different ways")
    _, destination = layouts(hf, *CASES[name])
    bound = sum(storage.nbytes for layout in destination for storage in layout.storages.values())
    baselines = {way: median(found[0][way]) for way in ("per_tensor", "flattened_bucket")}
    summaries = []
    for way in ("shm", "gloo"):
        total = median(found[0][way]["total"])
        slowest = max(measured["plan"] for measured in found.values())
        seconds = {"plan": slowest, "prepare": max(measured[way]["prepare"] for measured in found.values())}
        for phase in ("pack", "wire", "unpack", "commit"):
            seconds[phase] = max(median(round_[phase] for round_ in measured[way]["phases"]) for measured in found.values())
        summaries.append(
            {
                "name": name,
                "transport": way,
                "bytes_wire": sum(measured[way]["sent"] for measured in found.values()),
                "bytes_lower_bound": bound,
                "seconds": {**seconds, "verify": 0.0, "total": total},
                "baseline_seconds": baselines,
                "speedup": {way: seconds / total for way, seconds in baselines.items()},
                "peak_extra_bytes": max(measured[way]["buffers"] for measured in found.values()),
            }
        )
    return summaries


def copy_rates(hf: dict[str, Any] | None = None, rounds: int = 5) -> dict[str, float]:
    """Pack and unpack of one rank, digest included, each next to a plain parallel memcpy out of, or into, the same arrays.

    Returns:
        GB/s, medians of turns taken one after the other: "pack", "unpack", and "memcpy_out" and "memcpy_in" to compare them with;
        "pack_share" and "unpack_share", medians of the quotients; "threads".
    """
    hf = hf or MODEL
    source, destination = layouts(hf, *CASES["tp2xep2 -> tp2"])
    made = plan(family_of(hf).tensors(hf), source, destination)
    threads = min(4, os.cpu_count() or 1)
    turns: dict[str, tuple[int, Callable[[], None]]] = {}
    for name, rank in (("pack", 0), ("unpack", destination[0].rank)):
        packing = name == "pack"
        storages = (made.sources if packing else made.destinations)[rank]
        arrays = [np.ones(storage.size, np.uint16) for storage in storages.values()]
        turns[f"memcpy_{'out' if packing else 'in'}"] = _memcpy(arrays, threads, out=packing)
        turns[name] = _copier(made, rank, arrays, threads, packing=packing)
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, (nbytes, copy) in turns.items():
            started = time.perf_counter()
            copy()
            rates[name].append(nbytes / (time.perf_counter() - started) / 1e9)
    pairs = {"pack_share": ("pack", "memcpy_out"), "unpack_share": ("unpack", "memcpy_in")}
    shares = {share: median(a / b for a, b in zip(rates[ours], rates[plain], strict=True)) for share, (ours, plain) in pairs.items()}
    return {"threads": threads, **{name: median(values) for name, values in rates.items()}, **shares}


def _memcpy(arrays: list[np.ndarray], threads: int, *, out: bool) -> tuple[int, Callable[[], None]]:
    """Bytes, and a function that runs libc's memcpy between every array and one large buffer, an equal part on each thread."""
    total = sum(array.nbytes for array in arrays)
    buffer = np.ones(total, np.uint8)
    jobs: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
    place = 0
    for array in arrays:
        jobs[place * threads // total].append((buffer.ctypes.data + place, array.ctypes.data, array.nbytes))
        place += array.nbytes

    def part(i: int, keep: object = (buffer, arrays)) -> None:
        for there, here, nbytes in jobs[i]:
            ctypes.memmove(*((there, here) if out else (here, there)), nbytes)

    def copy() -> None:
        others = [threading.Thread(target=part, args=(i,)) for i in range(1, threads)]
        for thread in others:
            thread.start()
        part(0)
        for thread in others:
            thread.join()

    return total, copy


def _copier(made: Plan, rank: int, arrays: list[np.ndarray], threads: int, *, packing: bool) -> tuple[int, Callable[[], None]]:
    """Bytes, and a function that packs all messages of a rank, or unpacks them; through two buffers for each peer."""
    from asyncmoe.reshard.chunks import chunk_limits, cut_transfer
    from asyncmoe.reshard.exchange import message_program

    limits = chunk_limits(made, BUCKET_BYTES)
    remote = [t for t in made.transfers if t.source != t.destination and rank == (t.source if packing else t.destination)]
    chunks = [cut_transfer(made, t, limits[t.source, t.destination]) for t in remote]
    programs = [message_program(c, "destination" if packing else "source") for c in chunks]
    slots = [[np.ones(c.slot_bytes, np.uint8) for _ in range(2)] for c in chunks]
    mine = np.array([array.ctypes.data for array in arrays], np.int64)

    def copy(keep: object = arrays) -> None:
        for program, pair in zip(programs, slots, strict=True):
            for i in range(program.chunks):
                message = np.array([pair[i % 2].ctypes.data], np.int64)
                program.run(i, mine if packing else message, message if packing else mine, threads)

    return sum(t.nbytes for t in remote), copy
