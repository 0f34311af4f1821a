"""Ends of episodes that the controller has not heard of, in portions that a message has room for."""

from __future__ import annotations

from collections import deque

from asyncmoe.rpc.worker_messages import EpisodeOutcome

MOST_BYTES = 16 << 20
"""Of the outcomes in one message, unless it is a single one; a quarter of what a message may have."""


class UnheardOutcomes:
    """Outcomes with ascending numbers, kept until the controller says that it has them.

    Args:
        most: bytes of outcomes in one portion.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most, self._number = most, 0
        self._kept: deque[tuple[int, EpisodeOutcome]] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, outcome: EpisodeOutcome) -> None:
        """Keep an outcome; its number is the next."""
        self._number += 1
        self._kept.append((self._number, outcome))

    def heard(self, number: int) -> None:
        """Forget the outcomes up to this number."""
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def portion(self) -> tuple[int, tuple[EpisodeOutcome, ...]]:
        """Return the oldest outcomes, as many as fit and at least one if there is any, and the number of the last of them."""
        left, number, taken = self._most, self._number, list[EpisodeOutcome]()
        for at, outcome in self._kept:
            left -= size_of(outcome)
            if taken and left < 0:
                break
            taken.append(outcome)
            number = at
        return number, tuple(taken)


def size_of(outcome: EpisodeOutcome) -> int:
    """Return the bytes that an outcome takes in a message, at most."""
    return 256 + len(outcome.sampled) + 4 * (len(outcome.reason) + len(outcome.detail)) + 20 * len(outcome.rewards)
