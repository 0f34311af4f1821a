"""How fast one rank packs and unpacks, compared with plain parallel copies of the same bytes."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from asyncmoe.reshard import Plan
from asyncmoe.reshard.chunks import cut_transfer, cuts_of
from asyncmoe.reshard.programs import message_program

_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Turn = Callable[[], None]


def copy_rates(made: Plan, source: int, destination: int, bucket_bytes: int, rounds: int) -> dict[str, float]:
    """Measure packing (of rank `source`) and unpacking (of rank `destination`), digests included, and plain copies of as many bytes.

    "same" is libc's memcpy between the same arrays and one large buffer, array by array: packing without a plan. "fresh" is memcpy
    between two large arrays made for it, one call per thread: this machine's highest copy rate, which ignores that a model consists
    of many arrays. libc writes a copy of a few MB through the cache, which first reads the overwritten memory, and a larger one
    around it, so "same" is the slower of the two; pack and unpack always write around the cache.

    Returns:
        GB/s, medians over alternating turns: "pack", "unpack", "pack_same", "pack_fresh", "unpack_same",
        "unpack_fresh"; "..._share_same" and "..._share_fresh", medians of the per-turn ratios; "threads".
    """
    threads = min(4, os.cpu_count() or 1)
    turns: dict[str, tuple[int, Turn]] = {}
    for way, rank in (("pack", source), ("unpack", destination)):
        out = way == "pack"
        storages = (made.sources if out else made.destinations)[rank].values()
        arrays = [np.ones(s.size, _RAW[s.nbytes // s.size]) for s in storages]
        total = sum(array.nbytes for array in arrays)
        turns[f"{way}_same"] = plain_copies(arrays, threads, out=out)
        turns[f"{way}_fresh"] = plain_copies([np.ones(total // threads, np.uint8) for _ in range(threads)], threads, out=out)
        turns[way] = _copier(made, rank, arrays, bucket_bytes, threads, packing=out)
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, (nbytes, copy) in turns.items():
            started = time.perf_counter()
            copy()
            if number:
                rates[name].append(nbytes / (time.perf_counter() - started) / 1e9)
    found = {name: median(values) for name, values in rates.items()}
    for way in ("pack", "unpack"):
        for kind in ("same", "fresh"):
            found[f"{way}_share_{kind}"] = median(a / b for a, b in zip(rates[way], rates[f"{way}_{kind}"], strict=True))
    return {"threads": threads, **found}


def plain_copies(arrays: Sequence[np.ndarray], threads: int, *, out: bool) -> tuple[int, Turn]:
    """Return the bytes, and a function that runs libc's memcpy between every array and one large buffer, an equal part per thread."""
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


def _copier(made: Plan, rank: int, arrays: list[np.ndarray], bucket_bytes: int, threads: int, *, packing: bool) -> tuple[int, Turn]:
    """Return the bytes, and a function that packs or unpacks all messages of a rank, through two buffers per peer."""
    cuts = cuts_of(made, bucket_bytes)
    remote = [t for t in made.transfers if t.source != t.destination and rank == (t.source if packing else t.destination)]
    chunks = [cut_transfer(made, t, *cuts[t.source, t.destination]) for t in remote]
    programs = [message_program(c, "destination" if packing else "source") for c in chunks]
    slots = [[np.ones(c.slot_bytes, np.uint8) for _ in range(2)] for c in chunks]
    mine = np.array([array.ctypes.data for array in arrays], np.int64)

    def copy(keep: object = arrays) -> None:
        for program, pair in zip(programs, slots, strict=True):
            for i in range(program.chunks):
                message = np.array([pair[i % 2].ctypes.data], np.int64)
                program.run(i, mine if packing else message, message if packing else mine, threads)

    return sum(t.nbytes for t in remote), copy
