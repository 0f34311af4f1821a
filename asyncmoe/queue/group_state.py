"""When a group is complete, and when it fails: pure.

A group needs `size` complete responses. It may run additional, spare responses (over-sampling): the first `size` responses that finish
form the group, and the rest are cancelled. Long responses finish last, so training is biased towards short responses; this is the price
of not waiting for the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from asyncmoe.errors import InvariantBroken

Fate = Literal["spared", "again", "fallen"]
"""Consequence of a failed response: a spare response replaces it; it restarts alone; its whole group fails."""


@dataclass(frozen=True)
class Gathering:
    """One group in flight.

    Invariant: 0 <= done <= places <= size, 0 <= spare; places + spare - done responses are running.

    Attributes:
        size: complete responses the group needs.
        places: started responses that hold a place under the capacity law.
        spare: started responses beyond the places.
        done: complete responses.
    """

    size: int
    places: int = 0
    spare: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        if min(self.places, self.spare, self.done) < 0 or not self.done <= self.places <= self.size:
            raise InvariantBroken(f"group: impossible counts: {self}")

    @property
    def whole(self) -> bool:
        """True if the group has all its complete responses."""
        return self.done == self.size

    def admit(self, places: int, spare: int = 0) -> Gathering:
        """Record the start of more responses."""
        return replace(self, places=self.places + places, spare=self.spare + spare)

    def finish(self) -> Gathering:
        """Record a complete response."""
        return replace(self, done=self.done + 1)

    def close(self) -> Gathering:
        """Record that the spare responses of a whole group were cancelled."""
        return replace(self, spare=0)

    def fail(self, alone: bool) -> tuple[Gathering, Fate]:
        """Record a failed response.

        Args:
            alone: a restart of this response is worthwhile, and members may start alone.
        """
        if self.spare:
            return replace(self, spare=self.spare - 1), "spared"
        return (replace(self, places=self.places - 1), "again") if alone else (self, "fallen")


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, so every advantage within the group is 0 (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2)."""
    return min(rewards) == max(rewards)
