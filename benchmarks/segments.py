"""The journal's payload store (asyncmoe/journal/segments.py) next to the disk itself: the same bytes written plainly, and one fdatasync."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from asyncmoe.errors import InvariantBroken, UserError
from asyncmoe.journal.segments import Place, Segments
from benchmarks.provenance import here

PAYLOADS = {
    "plain-1k": 24 << 10,
    "routed-1k": 376 << 10,
    "routed-8k": 3 << 20,
    "group-16x8k": 48 << 20,
}
"""Bytes of payloads of Qwen3-30B-A3B's shape: 336 bytes of routes a token, and 24 of ids, log-probabilities and versions."""
_PARTS = 16
_AT_ONCE = 32
"""Payloads that wait for the disk at the same time."""
_IN_ROUND = 192 << 20


def run(folder: Path, rounds: int = 7, in_round: int = _IN_ROUND) -> dict[str, Any]:
    """Write payloads of each size to the store and plainly, in turn, to new files in `folder`; and read them back.

    Args:
        in_round: bytes of each measurement, roughly.

    Returns:
        "cases": by name of the payload: "bytes"; "store" and "plain": GBps from the first byte to the last durable one and cpu_s_per_GB,
        medians of the rounds; "ratio": of the speeds of a round, median, and "ratio_range"; read_GBps: of `Segments.read`, with the
        files in the page cache.

    Raises:
        UserError: the folder has too little room.
    """
    free = shutil.disk_usage(folder).free
    if free < 4 * in_round:
        raise UserError(f"free bytes under {folder}", got=free, expected=f"at least {4 * in_round}", hint="choose another --folder")
    return {**here(), "rounds": rounds, "cases": {name: _case(folder, size, rounds, in_round) for name, size in PAYLOADS.items()}}


def table(results: dict[str, Any]) -> str:
    """The results of `run` for a reader."""
    lines = [f"{'':34}{'store GB/s':>12}{'plain GB/s':>12}{'ratio':>8}{'CPU s/GB':>10}{'plain':>8}{'read GB/s':>11}"]
    for name, case in results["cases"].items():
        store, plain = case["store"], case["plain"]
        lines.append(
            f"{name:34}{store['GBps']:>12.2f}{plain['GBps']:>12.2f}{case['ratio']:>8.2f}{store['cpu_s_per_GB']:>10.2f}"
            f"{plain['cpu_s_per_GB']:>8.2f}{case['read_GBps']:>11.2f}"
        )
    return "\n".join(lines)


def _case(folder: Path, size: int, rounds: int, in_round: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    parts = [part.data for part in np.array_split(random.integers(0, 256, size, dtype=np.uint8), _PARTS)]
    count = max(in_round // size, 2)
    seconds: dict[str, list[tuple[float, float]]] = {"store": [], "plain": []}
    reads: list[float] = []
    for number in range(rounds + 1):
        # Each goes first in every other round: the disk may still be at what the one before left it.
        ways: list[Callable[[Path], None]] = [_plainly(parts, count, seconds["plain"]), _to_store(parts, count, seconds["store"], reads)]
        for way in ways if number % 2 else reversed(ways):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                way(Path(place))
    del seconds["store"][0], seconds["plain"][0], reads[0]
    nbytes = count * size / 1e9
    ratios = [plain[0] / store[0] for store, plain in zip(seconds["store"], seconds["plain"], strict=True)]
    speeds = {
        way: {
            "GBps": round(nbytes / median(wall for wall, _ in each), 3),
            "cpu_s_per_GB": round(median(cpu for _, cpu in each) / nbytes, 3),
        }
        for way, each in seconds.items()
    }
    return {
        "bytes": size,
        "count": count,
        **speeds,
        "ratio": round(median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "read_GBps": round(nbytes / median(reads), 3),
    }


def _plainly(parts: Sequence[memoryview], count: int, seconds: list[tuple[float, float]]) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        fd = os.open(place / "plain", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with _Measured(seconds):
                for _ in range(count):
                    written = os.writev(fd, parts)
                    if written != sum(len(part) for part in parts):
                        raise InvariantBroken(f"the disk took {written} bytes of a payload")
                os.fdatasync(fd)
        finally:
            os.close(fd)

    return write


def _to_store(parts: Sequence[memoryview], count: int, seconds: list[tuple[float, float]], reads: list[float]) -> Callable[[Path], None]:
    async def keep(store: Segments) -> list[Place]:
        left, places = iter(range(count)), []
        size = sum(len(part) for part in parts)

        async def some() -> None:
            for _ in left:
                await store.room(size)
                place = store.append(parts)
                await store.durable(place)
                places.append(place)

        with _Measured(seconds):
            await asyncio.gather(*(some() for _ in range(_AT_ONCE)))
        return places

    def write(place: Path) -> None:
        with closing(Segments.open(place / "store", "benchmark", max_bytes=1 << 40)) as store:
            places = asyncio.run(keep(store))
            began = time.monotonic()
            for each in places:
                if len(store.read(each)) != each.length:
                    raise InvariantBroken("a payload came back shorter")
            reads.append(time.monotonic() - began)

    return write


class _Measured:
    """Appends (seconds, CPU seconds of this process) of its block."""

    def __init__(self, seconds: list[tuple[float, float]]) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        gc.collect()
        self._began = time.monotonic(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self._seconds.append((time.monotonic() - self._began[0], time.process_time() - self._began[1]))
