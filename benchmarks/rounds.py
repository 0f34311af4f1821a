"""How long an exchange takes that goes in lock-step rounds: a model without latencies, in which only the ranks' own links are busy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncmoe.reshard import Plan
from asyncmoe.reshard.chunks import cuts_of

Pair = tuple[int, int]


def lock_step_seconds(messages: Mapping[Pair, np.ndarray], bytes_per_s: float) -> float:
    """Every round lasts as long as its busiest rank sends, or receives, whichever is more; they follow each other.

    Args:
        messages: bytes of the messages of every pair (source, destination), one a round.
        bytes_per_s: of a rank's link, in each direction.
    """
    rounds = max((len(sizes) for sizes in messages.values()), default=0)
    busy: dict[tuple[str, int], np.ndarray] = {}
    for (source, destination), sizes in messages.items():
        for end in (("out", source), ("in", destination)):
            busy.setdefault(end, np.zeros(rounds))[: len(sizes)] += sizes
    return float(np.max(list(busy.values()), axis=0).sum() / bytes_per_s) if busy else 0.0


def ideal_seconds(messages: Mapping[Pair, np.ndarray], bytes_per_s: float) -> float:
    """As long as the busiest rank's link is busy with all it has to move."""
    return lock_step_seconds({pair: np.array([sizes.sum()]) for pair, sizes in messages.items()}, bytes_per_s)


def planned_messages(plan: Plan, bucket_bytes: int) -> dict[Pair, np.ndarray]:
    """Messages of all pairs of the whole plan, also where this is a part; those of a pair are taken to be equal, which they are but for
    the rows of a box that cannot be cut (`asyncmoe.reshard.chunks.cut_transfer`)."""
    cuts = cuts_of(plan, bucket_bytes)
    traffic: list[list[int]] = plan.match.traffic().tolist()
    return {(s, d): np.full(cuts[s, d].messages, nbytes / cuts[s, d].messages) for s, d, nbytes in traffic}
