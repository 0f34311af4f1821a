"""Trajectories of random tokens, for measuring and comparing trainers: the same in every process."""

from __future__ import annotations

import numpy as np

from asyncmoe.trajectory import NOT_SAMPLED, Routing, Trajectory, encode_routes


def demonstrations(count: int, tokens: int, vocabulary: int, routing: Routing | None = None) -> list[Trajectory]:
    """Make demonstrations in which every token but the first is trained on.

    Args:
        tokens: tokens of each, at least 2.
        vocabulary: upper bound (exclusive) of token ids.
        routing: a model's routing; every token but the last gets random recorded experts. None: no experts are recorded.
    """
    random = np.random.default_rng(0)
    found = []
    for index in range(count):
        key = f"random{index}"
        drawn = random.integers(0, vocabulary, tokens).astype(np.int32)
        routes = None
        if routing is not None:
            scores = random.random((tokens - 1, routing.all_layers, routing.experts))
            experts = np.argsort(-scores, axis=-1)[..., : routing.top_k].astype(np.int32)
            routes = encode_routes(np.ascontiguousarray(experts), routing, key)
        found.append(
            Trajectory(
                key=key,
                group=index,
                episode=0,
                tokens=drawn,
                loss_mask=np.arange(tokens) > 0,
                logprobs=np.zeros(tokens, np.float32),
                versions=np.full(tokens, NOT_SAMPLED, np.int32),
                reward=0.0,
                finish="length",
                routes=routes,
            )
        )
    return found
