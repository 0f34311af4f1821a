"""Trajectories for tests; one with routes and masks, and what they were made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncmoe.trajectory import NOT_SAMPLED, Masks, Routing, Trajectory, encode_masks, encode_routes

ROUTING = Routing(all_layers=4, layers=(1, 2, 3), top_k=2, experts=300)
VOCABULARY = 50


def sampled(
    tokens: Any, mask: np.ndarray, logprobs: Any = -1.0, versions: Any = 3, group: int = 0, episode: int = 0, **more: Any
) -> Trajectory:
    """A trajectory of these tokens, sampled where `mask` says so.

    Args:
        logprobs: of all sampled tokens, or [T].
        versions: likewise.
        more: other fields of the trajectory.
    """
    fields = {"key": f"g{group}.e{episode}", "reward": 1.0, "finish": "stop", **more}
    return Trajectory(
        group=group,
        episode=episode,
        tokens=np.asarray(tokens, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        versions=np.where(mask, versions, NOT_SAMPLED).astype(np.int32),
        **fields,
    )


def masks_of(rows: Sequence[Sequence[int]], vocabulary: int) -> Masks:
    """Masks of tokens with these ids."""
    return Masks(np.cumsum([0, *map(len, rows)]).astype(np.int32), np.array([i for row in rows for i in row], np.int32), vocabulary)


def distinct(random: np.random.Generator, rows: int, layers: int, top_k: int, experts: int) -> np.ndarray:
    """int32[rows, layers, top_k]: of a token no expert of a layer twice, in any order."""
    gaps = np.sort(random.integers(0, experts - top_k + 1, (rows, layers, top_k), dtype=np.int32), axis=2)
    return random.permuted(gaps + np.arange(top_k, dtype=np.int32), axis=2)


def trajectory(length: int, seed: int, routing: Routing = ROUTING) -> tuple[Trajectory, np.ndarray, list[list[int]]]:
    """With its routes int32[length - 1, layers, top_k] and the ids of each token."""
    random = np.random.default_rng(seed)
    mask = np.arange(length) >= 2
    routes = np.argsort(random.random((length - 1, routing.all_layers, routing.experts)), axis=2)[:, :, : routing.top_k].astype(np.int32)
    ids = [sorted(random.choice(VOCABULARY, random.integers(1, 6), replace=False).tolist()) if m else [] for m in mask]
    tokens = np.array([random.choice(row) if row else 7 for row in ids], np.int32)
    key = f"g{seed}"
    packed, masks = encode_routes(routes, routing, key), encode_masks(masks_of(ids, VOCABULARY), key)
    return sampled(tokens, mask, group=seed, key=key, reward=0.0, routes=packed, masks=masks), routes, ids
