"""Speed of the log in a folder, compared with the disk: many tasks append payloads, each waiting until its own is durable."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asyncmoe.log.files import FileLog
from benchmarks.provenance import here

CASES = {"groups": (4 << 20, 1 << 30), "turns": (64 << 10, 256 << 20), "changes": (256, 2 << 20)}
"""Bytes of a record, and of all records together."""
_TASKS = 64


def run(folder: Path | None = None) -> dict[str, Any]:
    """Measure in a folder; None: a temporary one.

    Returns:
        {"date", "machine", "load", "disk_GBps" (plain writes and one fdatasync at the end), "cases"}. Of a case: "bytes" of a record,
        "GBps", "records_per_s", "cpu_s" of the log's thread for a GB, and "read_GBps" (opened and verified).
    """
    with TemporaryDirectory(dir=folder) as place:
        found = {**here(), "disk_GBps": _disk(Path(place) / "plain", *CASES["groups"])}
        return {**found, "cases": [_case(Path(place) / name, name, *sizes) for name, sizes in CASES.items()]}


def table(found: dict[str, Any]) -> str:
    """Format one line per case."""
    lines = [f"{'records':>9}{'bytes':>9}{'GB/s':>8}{'records/s':>11}{'CPU s/GB':>10}{'read GB/s':>11}"]
    for one in found["cases"]:
        figures = f"{one['GBps']:8.3f}{one['records_per_s']:11.0f}{one['cpu_s']:10.2f}{one['read_GBps']:11.2f}"
        lines.append(f"{one['name']:>9}{one['bytes']:9}{figures}")
    return "\n".join([*lines, f"the disk, written plainly: {found['disk_GBps']:.3f} GB/s"])


def _disk(file: Path, size: int, total: int) -> float:
    data, begin = os.urandom(size), time.perf_counter()
    with file.open("wb", buffering=0) as opened:
        for _ in range(total // size):
            opened.write(data)
        os.fdatasync(opened.fileno())
    taken = time.perf_counter() - begin
    file.unlink()
    return round(total / taken / 1e9, 3)


def _case(folder: Path, name: str, size: int, total: int) -> dict[str, Any]:
    log, begin, cpu_s = FileLog(folder, "bench", name), time.perf_counter(), _others_cpu_s()
    with closing(log):
        asyncio.run(_fill(log, os.urandom(size), total // size))
        taken = time.perf_counter() - begin
    cpu_s = _others_cpu_s() - cpu_s
    begin = time.perf_counter()
    with closing(FileLog(folder, "bench", name)) as again:
        assert sum(1 for _ in again.read()) == total // size
    read = time.perf_counter() - begin
    rates = {"GBps": round(total / taken / 1e9, 4), "records_per_s": round(total / size / taken), "read_GBps": round(total / read / 1e9, 2)}
    return {"name": name, "bytes": size, **rates, "cpu_s": round(cpu_s / total * 1e9, 2)}


def _others_cpu_s() -> float:
    """Return the CPU seconds of all threads but this one."""
    return time.process_time() - time.thread_time()


async def _fill(log: FileLog, data: bytes, count: int) -> None:
    left = iter(range(count))

    async def one() -> None:
        for _ in left:
            await log.durable(log.append([data]))

    await asyncio.gather(*(one() for _ in range(_TASKS)))
