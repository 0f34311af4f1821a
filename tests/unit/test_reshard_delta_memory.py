"""Memory that deltas take, as the kernel counts it: not with sanitizers, which keep what is freed."""

from __future__ import annotations

import numpy as np
from delta_ranks import change
from test_reshard_delta import large

from benchmarks.memory import Growth


def test_memory_that_a_delta_takes() -> None:
    """Of 64 MB with one element in a hundred changed: each side keeps its coded bytes (1.6 %); one message exists twice for a moment."""
    ranks, _, _ = large("bfloat16", 2, 8000, 4000)
    ranks.full(1)
    change(ranks.sources[0]["s"], 0.01, np.random.default_rng(1))
    growth = Growth()
    ranks.encode(2)
    ranks.commit(2)
    assert growth.peak_bytes() < 0.05 * 2 * ranks.senders[0].base_bytes
