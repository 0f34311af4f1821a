"""What ran in some work, from a trace of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

_ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")


def traced(work: Callable[[], object], file: Path) -> tuple[int, float]:
    """Return how many kernels and copies some work launches, and the seconds during which at least one runs; without a card, the same of
    operations. The work must wait for its kernels.

    Args:
        file: where the trace is written; its name ends with ".json.gz".
    """
    card, activity = torch.cuda.is_available(), torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if card else activity.CPU]) as profile:
        work()
    profile.export_chrome_trace(str(file))
    with gzip.open(file) as trace:
        events = json.load(trace)["traceEvents"]
    spans = [(event["ts"], event["dur"]) for event in events if event.get("cat") in (_ON_CARD if card else ("cpu_op",))]
    return len(spans), covered(spans) / 1e6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length that spans (begin, length) cover together."""
    whole = end = 0.0
    for begin, length in sorted(spans):
        whole += max(0.0, begin + length - max(begin, end))
        end = max(end, begin + length)
    return whole
