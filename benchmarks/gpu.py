"""Packing and unpacking of one rank on a GPU, between plain device-to-device copies of as many bytes in the same run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken
from asyncmoe.models import family_of
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.reshard import Plan, plan
from asyncmoe.reshard.chunks import Chunks, cut_transfer, cuts_of, row_major_strides
from asyncmoe.reshard.gpu import Gpu
from asyncmoe.reshard.memory import DeviceBuffer
from asyncmoe.reshard.plan import DESTINATION_STRIDES, EXTENTS, ITEM, SOURCE_STRIDES, Transfer
from asyncmoe.reshard.programs import message_program
from benchmarks.device_copies import Timer, Turn, batched, one_by_one, pieces_of
from benchmarks.provenance import today
from benchmarks.published import REAL

TRAINER, ENGINE = MegatronParallel(tp=2, ep=4, dp=2), EngineParallel(tp=4)
"""On either side, a rank has a quarter of the experts: about 15 GiB of bfloat16."""
ROUNDS, WARM_UP = 9, 2
WAYS = ("run", "rows", "uneven")
_PATTERN_BYTES = 64 << 20
_SEAL = 0x5EA1
_MOST_BASES = 1 << 17
_UNEVEN_BYTES = 8
"""Shift of a message that makes all its accesses unaligned."""

MODEL = REAL["Qwen3-30B-A3B"]


def run(scale: float = 1.0, bucket_bytes: int = 512 << 20) -> dict[str, Any]:
    """Measure on GPU 0.

    Args:
        scale: share of the model's layers, in (0, 1].
        bucket_bytes: as for an `Exchanger`; a kernel launch is one message.

    Returns:
        {"date", "card", "model", "bucket_bytes", "pack", "unpack"}; for either side "bytes", "messages", and "rate" and "device_rate":
        GB/s by the wall clock and by the device's events (each byte counted once), medians of `ROUNDS` alternating turns, of

        - "copy": the kernel, digest included.
        - "whole": one cudaMemcpyAsync of as many bytes. Memory allows no more: the bound of all others.
        - "batch": one cudaMemcpyBatchAsync of the same arrays in pieces of a message's size: what a copy of many arrays can reach without
          the kernel. None without CUDA 13.
        - "memcpy": the same pieces, a cudaMemcpyAsync for each. Its cost is launches: with arrays of a few MB it bounds nothing.

        "share": the median of the turns' ratios of "copy" to "whole", by events. "ways": for each of the kernel's copy methods
        (csrc/copy_table.h: "run", "rows", "uneven") its "share" of the bytes, and the "rate", by events, of messages that use only it, None
        if no box does. Messages of "uneven" have all boxes, shifted to 8 bytes after a multiple of 16.

    Raises:
        UserError: no GPU, or no kernels built.
        InvariantBroken: a packed message does not match its digest.
    """
    gpu = Gpu(0)
    hf = {**MODEL, "num_hidden_layers": max(1, round(MODEL["num_hidden_layers"] * scale))}
    made = shard_plan(hf)
    sides = {name: _measured(gpu, made, rank, bucket_bytes) for name, rank in (("pack", 0), ("unpack", TRAINER.world))}
    shown = {key: hf[key] for key in ("hidden_size", "num_hidden_layers", "num_experts", "moe_intermediate_size", "vocab_size")}
    return {"date": today(), "card": _C.cuda_device_name(0), "model": shown, "bucket_bytes": bucket_bytes, **sides}


def shard_plan(hf: dict[str, Any]) -> Plan:
    """Return rank 0's and the first engine rank's parts of the plan from `TRAINER` to `ENGINE`."""
    family, dtype = family_of(hf), "bfloat16"
    source = [family.megatron_layout(hf, TRAINER, rank, dtype) for rank in range(TRAINER.world)]
    destination = [family.sglang_layout(hf, ENGINE, rank, dtype).at(TRAINER.world + rank) for rank in range(ENGINE.tp)]
    return plan(family.tensors(hf), source, destination, ranks=[0, TRAINER.world])


def results_path(results: dict[str, Any]) -> Path:
    """Return the path of results: one file per card and day."""
    card = re.sub(r"[^A-Za-z0-9]+", "-", results["card"]).strip("-").lower()
    return Path(__file__).parent / "results" / f"gpu-{results['date']}-{card}.json"


def _measured(gpu: Gpu, made: Plan, rank: int, bucket_bytes: int) -> dict[str, Any]:
    """Measure one side, see `run`. Contents are random: a GPU may be faster on zeros."""
    packing, timer = rank in made.sources, Timer(gpu)
    storages = (made.sources if packing else made.destinations)[rank]
    arrays = [gpu.allocate(storage.nbytes) for storage in storages.values()]
    cuts = cuts_of(made, bucket_bytes)
    remote = [t for t in made.transfers if t.source != t.destination and rank == (t.source if packing else t.destination)]
    lanes = [cut_transfer(made, t, *cuts[t.source, t.destination]) for t in remote]
    slots = [[gpu.allocate(lane.slot_bytes + _UNEVEN_BYTES) for _ in range(2)] for lane in lanes]
    nbytes, messages = sum(t.nbytes for t in remote), sum(len(lane) for lane in lanes)
    ends = [gpu.allocate(max(nbytes, sum(array.nbytes for array in arrays))) for _ in range(2)]
    _fill(gpu, timer, [*arrays, *ends, *(slot for pair in slots for slot in pair)])
    pieces = pieces_of(arrays, ends[0], nbytes // messages // 256 * 256, out=packing)
    copied = sum(count for _, _, count in pieces)
    turns: dict[str, tuple[int, Turn | None]] = {
        "copy": (nbytes, _kernels(gpu, timer, lanes, slots, arrays, packing)),
        "whole": (nbytes, one_by_one([(ends[0].address, ends[1].address, nbytes)], gpu, timer.handle)),
        "batch": (copied, batched(pieces, timer.handle)),
        "memcpy": (copied, one_by_one(pieces, gpu, timer.handle)),
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for turn in range(WARM_UP + ROUNDS):
        for name, (count, enqueue) in turns.items():
            if enqueue is not None:
                wall, device = timer.seconds(enqueue)
                if turn >= WARM_UP:
                    rates[name].append((count / wall / 1e9, count / device / 1e9))
    if packing:
        _verify(gpu, timer, lanes, slots, arrays)
    share = median(ours / whole for (_, ours), (_, whole) in zip(rates["copy"], rates["whole"], strict=True))
    shares = ways_of(message_program(lane, "destination" if packing else "source") for lane in lanes)
    ways: dict[str, dict[str, float | None]] = {}
    for way in WAYS:
        parts = [boxes_of(t, way, packing) for t in remote]
        chosen = [(cut_transfer(made, t, *cuts[t.source, t.destination]), pair) for t, pair in zip(parts, slots, strict=True) if t.nbytes]
        measured = _rate_of(gpu, timer, chosen, arrays, packing, shift=_UNEVEN_BYTES if way == "uneven" else 0) if chosen else None
        ways[way] = {"share": shares.get(way, 0) / nbytes, "rate": measured}
    by_wall, by_events = ({name: median(one[k] for one in found) if found else None for name, found in rates.items()} for k in (0, 1))
    return {"bytes": nbytes, "messages": messages, "rate": by_wall, "device_rate": by_events, "share": share, "ways": ways}


def ways_of(programs: Iterable[_C.Program]) -> dict[str, int]:
    """Return the bytes that the copy kernel copies by each of `WAYS` if all arrays begin at multiples of 16."""
    bases = np.zeros(_MOST_BASES, np.int64)
    found: dict[str, int] = {}
    for program in programs:
        for chunk in range(program.chunks):
            for (way, _), (_, nbytes) in _C.ways_on_cuda(program, chunk, bases, bases).items():
                found[way] = found.get(way, 0) + nbytes
    return found


def boxes_of(transfer: Transfer, way: str, packing: bool) -> Transfer:
    """Return the boxes of a transfer that are one run in their storage, those that are not, or, for "uneven", all."""
    copies = transfer.copies
    strides = copies[:, SOURCE_STRIDES if packing else DESTINATION_STRIDES]
    contiguous = ((strides == row_major_strides(copies[:, EXTENTS], copies[:, ITEM])) | (copies[:, EXTENTS] == 1)).all(1)
    chosen = copies[{"run": contiguous, "rows": ~contiguous, "uneven": np.ones_like(contiguous)}[way]]
    return replace(transfer, copies=chosen, nbytes=int((chosen[:, EXTENTS].prod(1) * chosen[:, ITEM]).sum()))


def _rate_of(
    gpu: Gpu, timer: Timer, lanes: list[tuple[Chunks, list[DeviceBuffer]]], arrays: list[DeviceBuffer], packing: bool, *, shift: int
) -> float:
    """Return the GB/s of lanes through their buffers, whose first `shift` bytes are skipped, by events."""
    slots = [[slot[shift : slot.nbytes] for slot in pair] for _, pair in lanes]
    enqueue = _kernels(gpu, timer, [lane for lane, _ in lanes], slots, arrays, packing)
    nbytes = sum(sum(lane.nbytes) for lane, _ in lanes)
    return median([nbytes / timer.seconds(enqueue)[1] / 1e9 for _ in range(WARM_UP + ROUNDS)][WARM_UP:])


def _fill(gpu: Gpu, timer: Timer, buffers: list[DeviceBuffer]) -> None:
    random, pattern = np.random.default_rng(0).integers(0, 256, _PATTERN_BYTES, np.uint8), gpu.allocate(_PATTERN_BYTES)
    _C.copy_plainly(gpu.index, pattern.address, random.ctypes.data, random.nbytes, timer.handle)
    for buffer in buffers:
        for start in range(0, buffer.nbytes, _PATTERN_BYTES):
            part = buffer[start : start + _PATTERN_BYTES]
            _C.copy_plainly(gpu.index, part.address, pattern.address, part.nbytes, timer.handle)
    timer.finish()


def _kernels(
    gpu: Gpu, timer: Timer, lanes: list[Chunks], slots: list[list[DeviceBuffer]], arrays: list[DeviceBuffer], packing: bool
) -> Turn:
    """Enqueue every message of a rank, through two buffers per lane."""
    programs = [_C.DeviceProgram(message_program(lane, "destination" if packing else "source"), gpu.index) for lane in lanes]
    mine, messages = _addresses(arrays), [[_addresses([slot]) for slot in pair] for pair in slots]

    def enqueue() -> None:
        for number in range(max(len(lane) for lane in lanes)):
            for program, lane, pair in zip(programs, lanes, messages, strict=True):
                if number < len(lane):
                    ends = (mine, pair[number % 2]) if packing else (pair[number % 2], mine)
                    program.run(number, *ends, _SEAL, timer.handle)

    return enqueue


def _verify(gpu: Gpu, timer: Timer, lanes: list[Chunks], slots: list[list[DeviceBuffer]], arrays: list[DeviceBuffer]) -> None:
    """Check the last message of each lane, as packed by the kernel, against the digest computed on the host."""
    _kernels(gpu, timer, lanes, slots, arrays, packing=True)()
    for lane, pair in zip(lanes, slots, strict=True):
        number = len(lane) - 1
        message = np.empty(lane.message_bytes(number), np.uint8)
        _C.copy_plainly(gpu.index, message.ctypes.data, pair[number % 2].address, message.nbytes, timer.handle)
        timer.finish()
        expected = _C.digest(message.ctypes.data, lane.nbytes[number]) ^ _SEAL
        if int(message[-8:].view(np.uint64)[0]) != expected:
            raise InvariantBroken(f"the GPU's digest of message {number + 1} to rank {lane.destination} is not the host's")


def _addresses(buffers: list[DeviceBuffer]) -> np.ndarray:
    return np.array([buffer.address for buffer in buffers], np.uint64).view(np.int64)
