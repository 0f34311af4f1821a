"""Which replica gets a message of a delta from its source, and passes it on to the others. Messages are passed on as they are coded.

Replicas are ranks with equal layouts, so a source has equal messages for all of them (`asyncmoe.reshard.delta_sender`). It sends each of
them to one replica, in turn, which sends it to the rest: the traffic of the sources does not grow with the number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Numbered = tuple[int, int]
"""A message: its source rank and its number, from 0, among the messages of this source for one set of replicas."""


def holder(message: Numbered, replicas: Sequence[int]) -> int:
    """Return the replica that gets a message from its source."""
    return replicas[sum(message) % len(replicas)]


def from_source(source: int, messages: Sequence[np.ndarray], replicas: Sequence[int]) -> dict[int, list[np.ndarray]]:
    """Return what a source sends to each replica."""
    found: dict[int, list[np.ndarray]] = {replica: [] for replica in replicas}
    for number, message in enumerate(messages):
        found[holder((source, number), replicas)].append(message)
    return found


def firsthand(rank: int, counts: Mapping[int, int], replicas: Sequence[int]) -> dict[int, list[Numbered]]:
    """Return the messages that a replica gets from their sources, by source, in the order in which they come.

    Args:
        counts: messages of each source.
    """
    every = {source: [(source, number) for number in range(count)] for source, count in counts.items()}
    return {source: [one for one in ours if holder(one, replicas) == rank] for source, ours in every.items()}


def secondhand(rank: int, counts: Mapping[int, int], replicas: Sequence[int]) -> dict[int, list[Numbered]]:
    """Return the messages that a replica gets from each other one, in the order in which they come: that of source and number."""
    return {other: in_order(firsthand(other, counts, replicas)) for other in replicas if other != rank}


def in_order(messages: Mapping[int, Iterable[Numbered]]) -> list[Numbered]:
    """Return all messages, sorted: the order in which a replica passes them on."""
    return sorted(one for several in messages.values() for one in several)
