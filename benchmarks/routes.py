"""Expert routes of Qwen3-30B-A3B's shape for benchmarks."""

from __future__ import annotations

import numpy as np

from asyncmoe.trajectory import Routing

ROUTING = Routing(all_layers=48, layers=tuple(range(48)), top_k=8, experts=128)
"""Qwen3-30B-A3B's."""


def drawn(tokens: int) -> np.ndarray:
    """int32[tokens, 48, 8]: distinct experts, a few of them far more often than others, as trained routers choose."""
    random = np.random.default_rng(0)
    liked = random.gumbel(size=(48, ROUTING.experts)).astype(np.float32)
    routes = np.empty((tokens, 48, ROUTING.top_k), np.int32)
    for layer in range(48):
        scores = liked[layer] + random.gumbel(size=(tokens, ROUTING.experts)).astype(np.float32)
        routes[:, layer] = np.argsort(-scores, axis=1)[:, : ROUTING.top_k]
    return routes
