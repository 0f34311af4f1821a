"""The bytes that a run of an exchange moved, and the duration of its parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Moved:
    """Bytes and times of one run of an exchange on this rank.

    Attributes:
        sent, received, local: bytes; messages count with their trailers.
        seconds: time of copying and digesting ("pack", "local", "unpack") and of waiting for peers ("wire"). Overlapping work is counted
            where the run waits for it, so the sum is the duration of the run.
    """

    sent: int = 0
    received: int = 0
    local: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("pack", "wire", "unpack", "local"), 0.0))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started
