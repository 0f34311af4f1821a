"""What a host counts while something is measured from barrier to barrier."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from benchmarks.network.flows import interface
from benchmarks.network.hosts import INTERFACE

T = TypeVar("T")


@dataclass(frozen=True)
class Counters:
    """What a host has counted since it started: bytes of its interface, segments that TCP sent again, CPU seconds of this process."""

    sent: int
    received: int
    retransmitted: int
    cpu_s: float


def counters() -> Counters:
    """Read them: /proc/net/dev (proc(5)) and snmp of this process's network namespace."""
    words = interface(INTERFACE)
    names, values = (line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:"))
    return Counters(words[8], words[0], int(values[names.index("RetransSegs")]), time.process_time())


def timed(turn: Callable[[], T]) -> tuple[T, dict[str, Any]]:
    """Run a turn of all ranks; return its result, and its "seconds" and the increase of `Counters`, from barrier to barrier."""
    dist.barrier()
    before, started = counters(), time.perf_counter()
    result = turn()
    dist.barrier()
    seconds, after = time.perf_counter() - started, counters()
    return result, {"seconds": seconds, **{name: value - getattr(before, name) for name, value in asdict(after).items()}}


class Clock:
    """Measures one step after another."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, or since this was made."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before
