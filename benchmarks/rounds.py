"""A model of the duration of an exchange in lock-step rounds, without latencies, limited only by the ranks' own links."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncmoe.reshard import Plan
from asyncmoe.reshard.chunks import cuts_of

Pair = tuple[int, int]


def lock_step_seconds(messages: Mapping[Pair, np.ndarray], bytes_per_s: float) -> float:
    """Return the seconds of consecutive rounds, each as long as its busiest rank sends or receives, whichever is longer.

    Args:
        messages: bytes of the messages of every pair (source, destination), one per round.
        bytes_per_s: rate of a rank's link, in each direction.
    """
    rounds = max((len(sizes) for sizes in messages.values()), default=0)
    busy: dict[tuple[str, int], np.ndarray] = {}
    for (source, destination), sizes in messages.items():
        for end in (("out", source), ("in", destination)):
            busy.setdefault(end, np.zeros(rounds))[: len(sizes)] += sizes
    return float(np.max(list(busy.values()), axis=0).sum() / bytes_per_s) if busy else 0.0


def ideal_seconds(messages: Mapping[Pair, np.ndarray], bytes_per_s: float) -> float:
    """Return the seconds that the busiest rank's link needs for all its bytes."""
    return lock_step_seconds({pair: np.array([sizes.sum()]) for pair, sizes in messages.items()}, bytes_per_s)


def planned_messages(plan: Plan, bucket_bytes: int) -> dict[Pair, np.ndarray]:
    """Return the messages of all pairs of the whole plan, even if this is a part. A pair's messages are assumed equal, as they are except
    for box rows that cannot be cut (`asyncmoe.reshard.chunks.cut_transfer`)."""
    cuts = cuts_of(plan, bucket_bytes)
    traffic: list[list[int]] = plan.match.traffic().tolist()
    return {(s, d): np.full(cuts[s, d].messages, nbytes / cuts[s, d].messages) for s, d, nbytes in traffic}
