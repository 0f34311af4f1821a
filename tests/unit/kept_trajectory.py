"""A trajectory with routes and masks, and their sources."""

from __future__ import annotations

import numpy as np

from asyncmoe.trajectory import Masks, Routing, Trajectory, encode_masks, encode_routes

ROUTING = Routing(all_layers=4, layers=(1, 2, 3), top_k=2, experts=300)
VOCABULARY = 50


def distinct(random: np.random.Generator, rows: int, layers: int, top_k: int, experts: int) -> np.ndarray:
    """int32[rows, layers, top_k]: of a token no expert of a layer twice, in any order."""
    gaps = np.sort(random.integers(0, experts - top_k + 1, (rows, layers, top_k), dtype=np.int32), axis=2)
    routes: np.ndarray = random.permuted(gaps + np.arange(top_k, dtype=np.int32), axis=2)
    return routes


def trajectory(length: int, seed: int, routing: Routing = ROUTING) -> tuple[Trajectory, np.ndarray, list[list[int]]]:
    """With its routes int32[length - 1, layers, top_k] and the ids of each token."""
    random = np.random.default_rng(seed)
    mask = np.arange(length) >= 2
    routes = np.argsort(random.random((length - 1, routing.all_layers, routing.experts)), axis=2)[:, :, : routing.top_k].astype(np.int32)
    ids = [sorted(random.choice(VOCABULARY, random.integers(1, 6), replace=False).tolist()) if m else [] for m in mask]
    tokens = np.array([random.choice(row) if row else 7 for row in ids], np.int32)
    offsets = np.cumsum([0, *map(len, ids)]).astype(np.int32)
    made = Trajectory(
        key=f"g{seed}",
        group=seed,
        episode=0,
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        reward=0.0,
        finish="stop",
        routes=encode_routes(routes, routing, f"g{seed}"),
        masks=encode_masks(Masks(offsets, np.array([i for row in ids for i in row], np.int32), VOCABULARY), f"g{seed}"),
    )
    return made, routes, ids
